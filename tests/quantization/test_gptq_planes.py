"""GPTQ in planes ("gptq_p"), packed by gptqmodel 7.7: see `golden/foreign/make_foreign.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.quantization.blockwise.word_packing import PlanePacking, packed
from tests.support.bnb_cases import same
from tests.support.paths import GOLDEN

FILE = "model.safetensors"
BITS = (3, 5, 6, 7)
Tensors = dict[str, torch.Tensor]


def written(folder: Path, form: str = "gptq_p") -> Tensors:
    """Return the values of the four layers, of which each has other bits."""
    state = load_file(GOLDEN / "foreign" / "gptq-planes.safetensors")
    values = {f"layers.{bits}.fc.weight": state.pop(f"values.{bits}") for bits in BITS}
    folder.mkdir()
    save_file(state | {"norm.weight": torch.ones(96).half()}, folder / FILE, {"format": "pt"})
    config = {
        "quant_method": "gptq", "bits": 5, "group_size": 32, "sym": False, "desc_act": False,
        "checkpoint_format": form, "dynamic": {f"+:layers.{n}": {"bits": n} for n in BITS},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return values


def test_decoded_as_the_library_does(tmp_path: Path) -> None:
    values = written(tmp_path / "in")
    with ckptmap.open(tmp_path / "in") as ckpt:
        for fqn, wanted in values.items():
            assert ckpt[fqn].encoding == "gptq"
            same(ckpt[fqn].read(), wanted)
            same(ckpt[fqn][5:41, 3:50], wanted[5:41, 3:50])
            same(ckpt[fqn][32:64, 64:96], wanted[32:64, 64:96])


def test_given_back_and_kept_where_no_form_is_named(tmp_path: Path) -> None:
    values = written(tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "dense", to="hf-fp16")
    dense = load_file(tmp_path / "dense" / FILE)
    ckptmap.convert(tmp_path / "dense", tmp_path / "back", as_=str(tmp_path / "in"))
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=2)
    source = str(tmp_path / "in")
    ckptmap.convert(tmp_path / "dcp", tmp_path / "again", to="hf", config_from=source)
    stored = load_file(tmp_path / "in" / FILE)
    for made in ("back", "again"):
        found = load_file(tmp_path / made / FILE)
        assert found.keys() == stored.keys()
        for key, value in stored.items():
            same(found[key], value)
    for fqn, wanted in values.items():
        same(dense[fqn], wanted)


def test_changed_values_are_packed_in_planes(tmp_path: Path) -> None:
    values = written(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["quantization_config"].pop(
        "dynamic"
    )  # which leaves open whether groups are in any order
    state = load_file(tmp_path / "in" / FILE)
    kept = {key: value for key, value in state.items() if ".5." in key or "norm" in key}
    save_file(kept, tmp_path / "in" / FILE, {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    values = {fqn: value for fqn, value in values.items() if ".5." in fqn}
    changed = {fqn: value * 0.5 for fqn, value in values.items()}
    torch.save(changed | {"norm.weight": torch.ones(96).half()}, tmp_path / "new.pt")
    done = ckptmap.convert(tmp_path / "new.pt", tmp_path / "out", as_=str(tmp_path / "in"))
    assert done.fidelity["quantize"] == 1
    with ckptmap.open(tmp_path / "out") as ckpt:
        for fqn, wanted in changed.items():
            step = (wanted.amax() - wanted.amin()) / (2 ** int(fqn.split(".")[1]) - 1)
            assert (ckpt[fqn].read() - wanted).abs().max() <= step


@pytest.mark.parametrize("bits", range(2, 9))
def test_planes_hold_every_code(bits: int) -> None:
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (3, 128), generator=torch.manual_seed(bits)).to(torch.int8)
    planes = PlanePacking(bits)
    words = planes.packed(codes)
    assert words.shape == (3, planes.words(128))
    if 32 % bits == 0:  # one plane
        assert torch.equal(words, packed(codes, bits, False))
    for start, count in ((0, 128), (37, 50), (32, 32), (95, 1)):
        first, length = planes.span(start, count)
        part = words[:, first : first + length].contiguous()
        assert torch.equal(planes.unpacked(part, start, count), codes[:, start : start + count])


def test_layouts_that_nothing_here_reads_are_refused_in_one_line(tmp_path: Path) -> None:
    written(tmp_path / "in", "marlin")
    with pytest.raises(ckptmap.CkptmapError, match="is part of a GPTQ or AWQ tensor") as caught:
        ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-fp16")
    assert "gptq_p and gemm are decoded" in str(caught.value.hint)
