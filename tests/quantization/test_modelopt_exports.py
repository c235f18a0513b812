"""ModelOpt's float8 of rows and tiles, int8 and packed int4, as it exported them (`golden/modelopt/make_modelopt.py`)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.quantization.modelopt.integers import paired, unpaired
from tests.support.bnb_cases import same
from tests.support.int8_models import loaded
from tests.support.merge_cases import adapted, save_adapter
from tests.support.paths import GOLDEN

EXPORTS = GOLDEN / "modelopt"
TRUTH: dict[str, dict[str, str]] = json.loads((EXPORTS / "truth.json").read_text())
FORMS = {
    "fp8-rows": "modelopt-fp8", "fp8-tiles": "modelopt-fp8", "int8-smooth": "modelopt-int8",
    "int4-awq": "modelopt-int4", "w4a8-awq": "modelopt-int4",
}  # fmt: skip
FILE, OWN = "model.safetensors", "hf_quant_config.json"
DOWN = "model.layers.0.mlp.down_proj.weight"
STEM = DOWN.removesuffix("weight")
QUERY = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def edited(name: str, to: Path, change: Callable[[Tensors], object]) -> Path:
    shutil.copytree(EXPORTS / name, to)
    tensors = load_file(to / FILE)
    change(tensors)
    save_file(tensors, to / FILE, {"format": "pt"})
    return to


@pytest.mark.parametrize("own", [False, True], ids=["both", "own"])
@pytest.mark.parametrize("name", FORMS)
def test_decoded_to_the_values_of_modelopt(name: str, own: bool, tmp_path: Path) -> None:
    """own: its older releases state nothing in config.json."""
    path = tmp_path / "in"
    shutil.copytree(EXPORTS / name, path)
    if own:
        config = json.loads((path / "config.json").read_text())
        del config["quantization_config"]
        (path / "config.json").write_text(json.dumps(config))
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == {*TRUTH[name], *ckpt} - {key for key in ckpt if "scale" in key}
        for fqn, wanted in TRUTH[name].items():
            assert ckpt[fqn].encoding == FORMS[name] and ckpt[fqn].dtype == "bfloat16"
            whole = ckpt[fqn].read()
            assert digest(whole) == wanted, fqn
            same(ckpt[fqn][5:29, 3:50], whole[5:29, 3:50])
            same(ckpt[fqn][31:33, 31:33], whole[31:33, 31:33])


@pytest.mark.parametrize("name", FORMS)
def test_into_training_and_back(name: str, tmp_path: Path) -> None:
    """A changed weight comes back within the steps of the form; one behind smoothed inputs is refused."""
    source = EXPORTS / name
    ckptmap.convert(source, tmp_path / "hf", to="hf-bf16")
    model = loaded(tmp_path / "hf").state_dict()
    assert {fqn: digest(model[fqn]) for fqn in TRUTH[name]} == TRUTH[name]
    assert not (tmp_path / "hf" / OWN).exists()
    ckptmap.convert(source, tmp_path / "ranks", to="fsdp2-bf16", world_size=3)
    ckptmap.convert(tmp_path / "ranks", tmp_path / "same", as_=source)
    given, got = load_file(source / FILE), load_file(tmp_path / "same" / FILE)
    assert given.keys() == got.keys()
    for key, value in given.items():
        same(value, got[key])
    state = load_file(tmp_path / "hf" / FILE)
    state[DOWN] = state[DOWN] * 1.25
    torch.save(state, tmp_path / "work.pt")
    if f"{STEM}pre_quant_scale" in given:
        with pytest.raises(ckptmap.CkptmapError, match=r"down_proj.*scaled by pre_quant_scale"):
            ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=source)
        return
    report = ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=source)
    assert report.likeness is not None and report.likeness.changed.keys() == {DOWN}
    got = load_file(tmp_path / "back" / FILE)
    assert {key for key in given if not torch.equal(given[key], got[key])} <= {
        DOWN,
        f"{DOWN}_scale",
    }
    with ckptmap.open(tmp_path / "back") as ckpt:
        found, wanted = ckpt[DOWN].read().float(), state[DOWN].float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.04


@pytest.mark.parametrize(("name", "most"), [("int8-smooth", 0.01), ("int4-awq", 0.16)])
def test_changed_integers_are_rounded_as_modelopt_rounds(
    name: str, most: float, tmp_path: Path
) -> None:
    """As its exports of `INT8_WEIGHT_ONLY_CFG` and `INT4_BLOCKWISE_WEIGHT_ONLY_CFG`: without smoothing."""

    def unsmoothed(state: Tensors) -> None:
        for key in [key for key in state if key.endswith("pre_quant_scale")]:
            del state[key]

    source = edited(name, tmp_path / "in", unsmoothed)
    ckptmap.convert(source, tmp_path / "work.pt", to="full-bf16")
    state = torch.load(tmp_path / "work.pt", weights_only=True)
    values = state[DOWN] = state[DOWN].flip(0) * 1.25
    values[3] = 0
    torch.save(state, tmp_path / "work.pt")
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=source)
    got = load_file(tmp_path / "back" / FILE)
    size, reach = (32, 7) if name == "int4-awq" else (values.shape[1], 127)
    blocks = values.float().view(len(values), -1, size)
    scale = blocks.abs().amax(2) / reach
    scale[3] = 1
    codes = (blocks / scale.unsqueeze(2)).round().clamp(-reach - 1, reach).to(torch.int8).flatten(1)
    same(got[f"{DOWN}_scale"], scale.view(got[f"{DOWN}_scale"].shape))
    if name == "int4-awq":
        pairs = codes.T.reshape(codes.shape[1], -1, 2)  # as its `pack_int4_in_uint8` does
        same(
            got[DOWN],
            ((pairs[..., 0] & 15) | (pairs[..., 1] << 4)).T.contiguous().view(torch.uint8),
        )
    else:
        same(got[DOWN], codes)
    with ckptmap.open(tmp_path / "back") as ckpt:
        error = (ckpt[DOWN].read().float() - values.float()).norm() / values.float().norm()
    assert float(error) < most


def test_pairs_of_rows() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).view(4, 4)
    packed = paired(codes)
    assert packed.shape == (2, 4) and packed.dtype == torch.uint8
    same(unpaired(packed, 0, 4), codes)
    same(unpaired(packed, 1, 2), codes[1:3])


@pytest.mark.parametrize(
    ("name", "to", "kept"),
    [("fp8-rows", "hf-ct-fp8", 7), ("fp8-tiles", "hf-ct-fp8", 7), ("int8-smooth", "hf-ct-int8", 0)],
)
def test_codes_kept_in_compressed_tensors(name: str, to: str, kept: int, tmp_path: Path) -> None:
    """Codes behind smoothed inputs are not those of the weight."""
    report = ckptmap.convert(EXPORTS / name, tmp_path / "out", to=to)
    moved = report.fidelity.get("codes", 0) + report.fidelity.get("exact", 0)
    assert moved == kept and (kept or report.fidelity["requantize"] == 7)
    with ckptmap.open(tmp_path / "out") as ckpt, ckptmap.open(EXPORTS / name) as before:
        for fqn in TRUTH[name]:
            found, wanted = ckpt[fqn].read().float(), before[fqn].read().float()
            assert float((found - wanted).norm() / wanted.norm()) < (0.005 if kept else 0.02)


def test_moved_beside_a_config_that_states_nothing(tmp_path: Path) -> None:
    """A file of another framework has no config.json: the records have all, and the config is written anew."""
    for name, algo in (
        ("fp8-rows", "FP8_PER_CHANNEL_PER_TOKEN"), ("fp8-tiles", "FP8_PB_WO"), ("w4a8-awq", "W4A8_AWQ"),
        ("int8-smooth", "W8A8_SQ_PER_CHANNEL"), ("int4-awq", "W4A16_AWQ"),
    ):  # fmt: skip
        ckptmap.convert(EXPORTS / name, tmp_path / f"{name}.pt", to="full")
        with ckptmap.open(tmp_path / f"{name}.pt") as ckpt:
            for fqn, wanted in TRUTH[name].items():
                assert digest(ckpt[fqn].read()) == wanted
        config = json.loads((EXPORTS / name / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        source = tmp_path / f"{name}.pt"
        ckptmap.convert(source, tmp_path / name, to="hf", config_from=str(tmp_path / "config.json"))
        made = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert (made["quant_method"], made["quant_algo"]) == ("modelopt", algo)
        with ckptmap.open(tmp_path / name) as ckpt:
            for fqn, wanted in TRUTH[name].items():
                assert digest(ckpt[fqn].read()) == wanted


def _short(state: Tensors) -> None:
    state[f"{STEM}pre_quant_scale"] = torch.ones(5)


def _infinite(state: Tensors) -> None:
    state[f"{DOWN}_scale"][3] = torch.inf


@pytest.mark.parametrize(
    ("change", "said"),
    [(_short, r"pre_quant_scale float32\[5\], expected one for each of 96"), (_infinite, "a finite scale, found inf")],
)  # fmt: skip
def test_bad_parts_are_refused(
    change: Callable[[Tensors], None], said: str, tmp_path: Path
) -> None:
    path = edited("int4-awq", tmp_path / "in", change)
    with pytest.raises(SourceError, match=said) as caught:
        ckptmap.convert(path, tmp_path / "out", to="hf-bf16")
    assert caught.value.code == "CKM115" and DOWN in caught.value.message


def test_a_config_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    for name, other in (("int8-smooth", "FP8"), ("int4-awq", "NVFP4")):
        shutil.copytree(EXPORTS / name, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["quantization_config"]["quant_algo"] = other
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises(SourceError, match=f"states quant_algo '{other}'.*stored as INT"):
            ckptmap.open(tmp_path / name)


def test_what_svdquant_leaves_moves_as_bytes(tmp_path: Path) -> None:
    """The layer adds a product of two small weights, which no form here holds."""

    def small(state: Tensors) -> None:
        state[f"{STEM}svdquant_lora_a"] = torch.ones(4, 96)

    path = edited("int4-awq", tmp_path / "in", small)
    plan = ckptmap.plan(path, "hf-bf16")
    assert {item.key for item in plan.unresolved} >= {DOWN, f"{DOWN}_scale"}


@pytest.mark.parametrize("name", FORMS)
def test_loaded_and_merged_as_its_values(name: str, tmp_path: Path) -> None:
    ckptmap.convert(EXPORTS / name, tmp_path / "dense", to="hf-bf16")
    dense = load_file(tmp_path / "dense" / FILE)
    model = loaded(tmp_path / "dense")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckptmap.load(EXPORTS / name, model)
    for key, value in dense.items():
        same(model.state_dict()[key], value)
    save_adapter(adapted(model, target_modules=["down_proj"]), tmp_path / "adapter")
    for base, out in ((EXPORTS / name, "over"), (tmp_path / "dense", "wanted")):
        ckptmap.merge(base, tmp_path / "adapter", tmp_path / out, to="hf-bf16")
    got, wanted = (load_file(tmp_path / out / FILE) for out in ("over", "wanted"))
    assert got.keys() == wanted.keys() and not torch.equal(got[DOWN], dense[DOWN])
    for key, value in wanted.items():
        same(got[key], value)
