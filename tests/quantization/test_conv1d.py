"""GPT-2's `Conv1D` weights are [in, out]; bitsandbytes' integration in transformers quantizes their transpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ckptmap
from tests.support.int8_models import logits
from tests.support.merge_cases import gpt2

CONFIGS: dict[str, dict[str, Any]] = {
    "bnb-nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb-nf4-dq": dict(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bnb-fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb-int8": dict(load_in_8bit=True),
}
CHANGED = "transformer.h.1.mlp.c_fc.weight"
FILE = "model.safetensors"


def dense(path: Path, changed: bool = False) -> Path:
    model = gpt2(torch.float16)
    if changed:
        with torch.no_grad():
            weight = model.get_parameter(CHANGED)
            weight.copy_(weight.flip(0) * 1.5)
    model.save_pretrained(path)
    return path


def loaded(path: Path, **more: Any) -> Any:
    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float16, output_loading_info=True, **more
    )
    assert not any(found.values()), found
    return model.eval()


def by_the_library(source: Path, form: str, path: Path) -> Path:
    loaded(source, quantization_config=BitsAndBytesConfig(**CONFIGS[form])).save_pretrained(path)
    return path


def codes(path: Path) -> dict[str, torch.Tensor]:
    """All stored tensors but the JSON of each weight, whose spelling is each writer's own."""
    return {k: v for k, v in load_file(path / FILE).items() if ".quant_state." not in k}


def assert_alike(path: Path, wanted: Path) -> None:
    mine, theirs = codes(path), codes(wanted)
    assert mine.keys() == theirs.keys()
    for key in theirs:
        assert_same(mine, theirs, key)


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], key: str) -> None:
    """Every bit, but those of scales that are quantized themselves: bitsandbytes sums their mean in another order."""
    got, wanted = mine[key], theirs[key]
    assert got.shape == wanted.shape, key
    scaled = key.endswith(".nested_absmax") or (
        key.endswith(".absmax") and wanted.dtype == torch.uint8
    )
    assert scaled or torch.equal(got, wanted.to(got.dtype)), key


def values(path: Path) -> torch.Tensor:
    with ckptmap.open(path) as ckpt:
        return torch.cat([ckpt[fqn].read().float().view(-1) for fqn in sorted(ckpt)])


@pytest.mark.parametrize("form", CONFIGS)
def test_written_as_the_library_does(form: str, tmp_path: Path) -> None:
    source = dense(tmp_path / "dense")
    report = ckptmap.convert(source, tmp_path / "out", to=f"hf-{form}")
    assert report.fidelity["quantize"] == 8, report
    theirs = by_the_library(source, form, tmp_path / "theirs")
    assert_alike(tmp_path / "out", theirs)
    if not form.endswith("-dq"):
        assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(theirs)))
    mine, wanted = values(tmp_path / "out"), values(theirs)
    assert float((mine - wanted).norm() / wanted.norm()) < (1e-3 if form.endswith("-dq") else 1e-9)
    assert float((mine - values(source)).norm() / mine.norm()) < 0.15
    assert ckptmap.verify(tmp_path / "out").ok


@pytest.mark.parametrize("form", CONFIGS)
def test_a_changed_weight_is_given_back(form: str, tmp_path: Path) -> None:
    release = by_the_library(dense(tmp_path / "dense"), form, tmp_path / "release")
    ckptmap.convert(release, tmp_path / "work.pt", to="full-fp16")
    state, trained = (
        torch.load(tmp_path / "work.pt"),
        load_file(dense(tmp_path / "changed", True) / FILE),
    )
    state[CHANGED] = trained[CHANGED]
    torch.save(state, tmp_path / "work.pt")
    report = ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=release)
    assert report.likeness is not None and report.likeness.changed == {CHANGED: "quantize"}
    truth = codes(by_the_library(tmp_path / "changed", form, tmp_path / "truth"))
    back, given = codes(tmp_path / "back"), codes(release)
    stem = CHANGED.removesuffix("weight")
    for key in given:
        assert_same(back, truth if key.startswith(stem) else given, key)


def test_by_its_names_alone_nothing_is_a_conv1d(tmp_path: Path) -> None:
    """Linear layers of other models have these names, too; without a config.json they stay as they are."""
    source = dense(tmp_path / "dense")
    assert not quantized(source, "full-bnb-nf4")
    assert len(quantized(source, "hf-bnb-nf4", no_encode=("*.c_fc.weight",))) == 6
    assert len(quantized(source, "hf-bnb-nf4", encode=("*.c_fc.weight",))) == 2


def quantized(source: Path, to: str, **options: Any) -> list[str]:
    return [s.fqn for s in ckptmap.plan(source, to, **options).steps if s.fidelity == "quantize"]
