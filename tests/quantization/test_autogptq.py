"""GPTQ and AWQ whose settings lie in a file of their own: AutoGPTQ up to 0.6 and AutoAWQ's first releases.

tests/golden/autogptq was written by AutoGPTQ 0.4.2 (make_autogptq.py there).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from tests.quantization.test_gptq import CONFIG, DOWN, FILE, GOLDEN, STEM, TRUTH, Tensors, digest
from tests.support.paths import ROOT

OLD = ROOT / "tests" / "golden" / "autogptq"
OLD_TRUTH: dict[str, dict[str, list[str]]] = json.loads((OLD / "truth.json").read_text())
OLD_FILE, SETTINGS, AWQ_SETTINGS = (
    "gptq_model-4bit-32g.safetensors",
    "quantize_config.json",
    "quant_config.json",
)


def old(to: Path, name: str = "plain", /, file: str = SETTINGS, **changes: object) -> Path:
    """A copy of a checkpoint of AutoGPTQ with other settings; None removes one."""
    shutil.copytree(OLD / name, to)
    stated = json.loads((to / SETTINGS).read_text()) | changes
    (to / SETTINGS).unlink()
    kept = {key: value for key, value in stated.items() if key not in changes or value is not None}
    (to / file).write_text(json.dumps(kept))
    return to


def awq(to: Path, name: str = "awq-4-asym", **changes: object) -> Path:
    """A golden of AWQ as AutoAWQ 0.1.5 saved it: `AwqConfig.to_dict` in quant_config.json alone."""
    shutil.copytree(GOLDEN / name, to)
    config = json.loads((to / CONFIG).read_text())
    stated = config.pop("quantization_config")
    own = {"zero_point": stated["zero_point"], "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (to / CONFIG).write_text(json.dumps(config))
    (to / AWQ_SETTINGS).write_text(json.dumps(own | changes, indent=4))
    return to


# ------------------------------------------------------------------------------- read


@pytest.mark.parametrize("name", OLD_TRUTH)
def test_decoded_as_autogptq_does(name: str, tmp_path: Path) -> None:
    with ckptmap.open(OLD / name) as ckpt:
        assert {ckpt[fqn].encoding for fqn in OLD_TRUTH[name]} == {"gptq"}
        for fqn, (own, _) in OLD_TRUTH[name].items():
            assert digest(ckpt[fqn].read()) == own, fqn
    ckptmap.convert(OLD / name, tmp_path / "out", to="hf-bf16")
    state = load_file(tmp_path / "out" / FILE)
    assert {fqn: digest(state[fqn]) for fqn in OLD_TRUTH[name]} == {
        fqn: cast for fqn, (_, cast) in OLD_TRUTH[name].items()
    }
    assert not (tmp_path / "out" / SETTINGS).exists()


@pytest.mark.parametrize("name", ["awq-4", "awq-4-asym"])
def test_settings_of_autoawq(name: str, tmp_path: Path) -> None:
    with ckptmap.open(awq(tmp_path / "in", name)) as ckpt:
        for fqn, (own, _) in TRUTH[name].items():
            assert ckpt[fqn].encoding == "awq"
            assert digest(ckpt[fqn].read()) == own, fqn


def test_other_names_of_the_files(tmp_path: Path) -> None:
    """AutoGPTQ also reads quant_config.json and AutoAWQ's layout from either, and saves by torch.save, too."""
    renamed = old(tmp_path / "renamed", file=AWQ_SETTINGS, quant_method="gptq")
    (renamed / OLD_FILE).rename(renamed / "model.safetensors")
    pickled = old(tmp_path / "pickled")
    torch.save(load_file(pickled / OLD_FILE), pickled / "gptq_model-4bit-32g.bin")
    (pickled / OLD_FILE).unlink()
    for path in (renamed, pickled):
        with ckptmap.open(path) as ckpt:
            assert digest(ckpt[DOWN].read()) == OLD_TRUTH["plain"][DOWN][0]
    either = awq(tmp_path / "either")
    (either / AWQ_SETTINGS).rename(either / SETTINGS)
    with ckptmap.open(either) as ckpt:
        assert digest(ckpt[DOWN].read()) == TRUTH["awq-4-asym"][DOWN][0]


def test_the_second_version_is_stated(tmp_path: Path) -> None:
    """The first version is meant where none is stated, which AutoGPTQ alone wrote; the parts look alike."""

    def higher(state: Tensors) -> Tensors:
        return {k: v + 0x11111111 if k.endswith("qzeros") else v for k, v in state.items()}

    path = old(tmp_path / "in", quant_method="gptq", checkpoint_format="gptq_v2")
    save_file(higher(load_file(path / OLD_FILE)), path / OLD_FILE, {"format": "pt"})
    with ckptmap.open(path) as ckpt:
        assert digest(ckpt[DOWN].read()) == OLD_TRUTH["plain"][DOWN][0]


def test_config_json_counts_where_both_state_something(tmp_path: Path) -> None:
    path = tmp_path / "in"
    shutil.copytree(GOLDEN / "gptq-4-v2", path)
    (path / SETTINGS).write_text(json.dumps({"bits": 3, "group_size": 128}))
    with ckptmap.open(path) as ckpt:
        assert digest(ckpt[DOWN].read()) == TRUTH["gptq-4-v2"][DOWN][0]


# ------------------------------------------------------------------------------- written


@pytest.mark.parametrize("name", OLD_TRUTH)
@pytest.mark.parametrize("to", ["full-bf16", "full", "fsdp2-bf16"])
def test_given_back_as_it_was(to: str, name: str, tmp_path: Path) -> None:
    sharded = to.startswith("fsdp2")
    work, release = tmp_path / ("work" if sharded else "work.pt"), OLD / name
    world = 2 if sharded else None
    ckptmap.convert(release, work, to=to, world_size=world)
    report = ckptmap.convert(work, tmp_path / "back", as_=release)
    assert report.likeness is not None
    assert not report.likeness.changed
    given, got = load_file(release / OLD_FILE), load_file(tmp_path / "back" / OLD_FILE)
    assert given.keys() == got.keys()
    assert all(torch.equal(given[key], got[key]) for key in given)
    for file in (CONFIG, SETTINGS):
        assert (tmp_path / "back" / file).read_bytes() == (release / file).read_bytes()
    assert ckptmap.verify(tmp_path / "back", against=work).ok


def test_awq_is_given_back_as_it_was(tmp_path: Path) -> None:
    release = awq(tmp_path / "release")
    ckptmap.convert(release, tmp_path / "work.pt", to="full-bf16")
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=release)
    for file in (CONFIG, AWQ_SETTINGS):
        assert (tmp_path / "back" / file).read_bytes() == (release / file).read_bytes()
    given, got = load_file(release / FILE), load_file(tmp_path / "back" / FILE)
    assert all(torch.equal(given[key], got[key]) for key in given)


def test_moved_as_it_is_it_states_its_settings_to_transformers(tmp_path: Path) -> None:
    ckptmap.convert(OLD / "plain", tmp_path / "gptq", to="hf")
    stated = json.loads((tmp_path / "gptq" / CONFIG).read_text())["quantization_config"]
    assert stated == {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    own = (OLD / "plain" / SETTINGS).read_bytes()
    assert (tmp_path / "gptq" / SETTINGS).read_bytes() == own
    ckptmap.convert(awq(tmp_path / "in"), tmp_path / "awq", to="hf")
    stated = json.loads((tmp_path / "awq" / CONFIG).read_text())["quantization_config"]
    assert stated["quant_method"] == "awq"
    assert (stated["bits"], stated["group_size"], stated["zero_point"]) == (4, 32, True)


def test_codes_kept_in_compressed_tensors(tmp_path: Path) -> None:
    sources = {"gptq": OLD / "plain", "awq": awq(tmp_path / "in")}
    for kind, source in sources.items():
        ckptmap.convert(source, tmp_path / kind, to="hf-ct-int4")
        assert ckptmap.plan(source, "hf-ct-int4").fidelities()["exact"] == 7
        truth = OLD_TRUTH["plain"] if kind == "gptq" else TRUTH["awq-4-asym"]
        with ckptmap.open(tmp_path / kind) as ckpt:
            assert {fqn: digest(ckpt[fqn].read()) for fqn in truth} == {
                fqn: own for fqn, (own, _) in truth.items()
            }
        assert not any((tmp_path / kind / file).exists() for file in (SETTINGS, AWQ_SETTINGS))
    assert ckptmap.plan(OLD / "order", "hf-ct-int4").fidelities()["requantize"] == 7


# ------------------------------------------------------------------------------- refused


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "bits": ({"bits": 8}, "quantize_config.json states bits 8, but qzeros int32.* have 4 bits"),
    "text": ({"bits": "4"}, "quantize_config.json, expected a number as bits, found '4'"),
    "group": ({"group_size": 64}, "quantize_config.json states group_size 64, but scales"),
    "no group": ({"group_size": None}, "quantize_config.json, expected a number as group_size"),
    "layout": ({"version": "gemm"}, "quantize_config.json states quant_method 'awq'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_contradict_the_tensors(case: str, tmp_path: Path) -> None:
    changes, said = REFUSED[case]
    with pytest.raises(ckptmap.CkptmapError, match=said) as caught:
        ckptmap.open(old(tmp_path / "in", **changes))
    assert caught.value.code == "CKM115"
    assert "\n" not in caught.value.message


def test_an_order_that_the_settings_deny(tmp_path: Path) -> None:
    path = old(tmp_path / "in", "order", desc_act=False)
    denied = pytest.raises(ckptmap.CkptmapError, match="states desc_act false")
    with ckptmap.open(path) as ckpt, denied as caught:
        ckpt[DOWN].read()
    assert caught.value.code == "CKM115"
    unstated = old(tmp_path / "unstated", "order", desc_act=None)
    with ckptmap.open(unstated) as ckpt:
        assert digest(ckpt[DOWN].read()) == OLD_TRUTH["order"][DOWN][0]


def test_modules_that_the_settings_keep(tmp_path: Path) -> None:
    path = awq(tmp_path / "in", modules_to_not_convert=[STEM.removesuffix(".")])
    with pytest.raises(ckptmap.CkptmapError, match=r"quant_config\.json states .* in modules_to"):
        ckptmap.open(path)


@pytest.mark.parametrize(
    ("change", "content"),
    [
        ({"is_marlin_format": True}, None),
        ({"quant_method": "marlin"}, None),
        ({"checkpoint_format": "marlin"}, None),
        ({"bits": None}, None),
        ({}, "{"),
        ({}, "[4]"),
    ],
)
def test_what_is_not_known_moves_as_bytes(
    change: dict[str, object], content: str | None, tmp_path: Path
) -> None:
    """Nothing is guessed from the shapes: the next step names what is missing."""
    path = old(tmp_path / "in", **change)
    if content is not None:
        (path / SETTINGS).write_text(content)
    before = load_file(path / OLD_FILE)
    (item, *_) = ckptmap.plan(path, "hf-bf16").unresolved
    assert "GPTQ or AWQ" in item.reason
    assert SETTINGS in item.hint
    ckptmap.convert(path, tmp_path / "out", to="hf")
    after = load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(before[key], after[key]) for key in before)
