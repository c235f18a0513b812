"""Quark's float8 and int8 of rows and its packed int4, as it exported them (`golden/quark/make_quark.py`)."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from tests.support.bnb_cases import same
from tests.support.int8_models import loaded
from tests.support.merge_cases import adapted, save_adapter
from tests.support.paths import GOLDEN

EXPORTS = GOLDEN / "quark"
TRUTH: dict[str, dict[str, str]] = json.loads((EXPORTS / "truth_of_integers.json").read_text())
FORMS = {
    "fp8-rows": "quark-fp8",
    "int8-rows": "quark-int8",
    "int4": "quark-int4",
    "uint4": "quark-int4",
}
FILE = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def stating(name: str, to: Path, **changes: object) -> Path:
    """A copy of an export, with changes to its quantization_config."""
    shutil.copytree(EXPORTS / name, to)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] |= changes
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("name", FORMS)
def test_the_values_are_those_of_quark(name: str, tmp_path: Path) -> None:
    """Read from the export, and again from a file of torch with records in place of a config."""
    ckptmap.convert(EXPORTS / name, tmp_path / "moved.pt", to="full")
    for path in (EXPORTS / name, tmp_path / "moved.pt"):
        with ckptmap.open(path) as ckpt:
            assert not any("scale" in key or "zero_point" in key for key in ckpt)
            for fqn, wanted in TRUTH[name].items():
                assert ckpt[fqn].encoding == FORMS[name]
                whole = ckpt[fqn].read()
                assert digest(whole) == wanted, fqn
                same(ckpt[fqn][5:29, 3:50], whole[5:29, 3:50])
    ckptmap.convert(tmp_path / "moved.pt", tmp_path / "again", as_=EXPORTS / name)
    given, got = load_file(EXPORTS / name / FILE), load_file(tmp_path / "again" / FILE)
    assert given.keys() == got.keys()
    for key, value in given.items():
        same(value, got[key])


@pytest.mark.parametrize("name", FORMS)
def test_into_training_and_back(name: str, tmp_path: Path) -> None:
    source = EXPORTS / name
    ckptmap.convert(source, tmp_path / "hf", to="hf-bf16")
    model = loaded(tmp_path / "hf")
    assert {fqn: digest(model.state_dict()[fqn]) for fqn in TRUTH[name]} == TRUTH[name]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckptmap.load(source, model)
    state = load_file(tmp_path / "hf" / FILE)
    for key, value in state.items():
        same(model.state_dict()[key], value)
    state[DOWN] = state[DOWN].flip(0) * 1.25
    torch.save(state, tmp_path / "work.pt")
    report = ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=source)
    assert report.likeness is not None and report.likeness.changed.keys() == {DOWN}
    given, got = load_file(source / FILE), load_file(tmp_path / "back" / FILE)
    assert {key: (t.dtype, t.shape) for key, t in given.items()} == {
        key: (t.dtype, t.shape) for key, t in got.items()
    }
    changed = {key for key in given if not torch.equal(given[key], got[key])}
    assert DOWN in changed and changed <= {DOWN, f"{DOWN}_scale", f"{DOWN}_zero_point"}
    if name in ("int8-rows", "int4"):
        assert f"{DOWN}_zero_point" not in changed, "it states symmetric codes"
    with ckptmap.open(tmp_path / "back") as ckpt:
        found, wanted = ckpt[DOWN].read().float(), state[DOWN].float()
    most = {"fp8-rows": 0.04, "int8-rows": 0.012}.get(name, 0.15)
    assert float((found - wanted).norm() / wanted.norm()) < most


@pytest.mark.parametrize("name", ["int4", "uint4", "int8-rows"])
def test_codes_kept_in_compressed_tensors(name: str, tmp_path: Path) -> None:
    to = "hf-ct-int8" if name == "int8-rows" else "hf-ct-int4"
    report = ckptmap.convert(EXPORTS / name, tmp_path / "out", to=to)
    assert report.fidelity.get("exact", 0) + report.fidelity.get("codes", 0) == len(TRUTH[name])
    with ckptmap.open(tmp_path / "out") as ckpt:
        for fqn, wanted in TRUTH[name].items():
            assert digest(ckpt[fqn].read()) == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"export": {"pack_method": "order", "weight_format": "real_quantized"}},
        {"layer_quant_config": {"*q_proj": {"weight": {"dtype": "uint4"}}}},
        {"quant_method": "awq"},
    ],
)
def test_what_the_config_does_not_tell_moves_as_bytes(
    changes: dict[str, object], tmp_path: Path
) -> None:
    path = stating("int4", tmp_path / "in", **changes)
    plan = ckptmap.plan(path, "hf-bf16")
    assert DOWN in {item.key for item in plan.unresolved}
    ckptmap.convert(path, tmp_path / "out", to="hf")
    assert (tmp_path / "out" / FILE).read_bytes() == (path / FILE).read_bytes()


def test_zero_points_that_the_config_calls_symmetric(tmp_path: Path) -> None:
    path = tmp_path / "in"
    shutil.copytree(EXPORTS / "int8-rows", path)
    stored = load_file(path / FILE)
    stored[f"{DOWN}_zero_point"][3] = 5
    save_file(stored, path / FILE, {"format": "pt"})
    with ckptmap.open(path) as ckpt:
        wanted = (stored[DOWN].float() - stored[f"{DOWN}_zero_point"].float()[:, None]) * stored[
            f"{DOWN}_scale"
        ].float()[:, None]
        same(ckpt[DOWN].read(), wanted.bfloat16())
    with pytest.raises(ckptmap.CkptmapError, match="zero points are not all 0") as caught:
        ckptmap.convert(path, tmp_path / "out", to="hf-ct-int8")
    assert caught.value.code == "CKM315"


@pytest.mark.parametrize("name", FORMS)
def test_a_lora_adapter_is_merged_as_into_its_values(name: str, tmp_path: Path) -> None:
    ckptmap.convert(EXPORTS / name, tmp_path / "dense", to="hf-bf16")
    model = adapted(loaded(tmp_path / "dense"), target_modules=["down_proj"])
    save_adapter(model, tmp_path / "adapter")
    for base, out in ((EXPORTS / name, "over"), (tmp_path / "dense", "wanted")):
        ckptmap.merge(base, tmp_path / "adapter", tmp_path / out, to="hf-bf16")
    dense, got, wanted = (load_file(tmp_path / out / FILE) for out in ("dense", "over", "wanted"))
    assert got.keys() == wanted.keys() and not torch.equal(got[DOWN], dense[DOWN])
    for key, value in wanted.items():
        same(got[key], value)
