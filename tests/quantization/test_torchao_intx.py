"""`IntxUnpackedToInt8Tensor` with zero points, as transformers saves what torchao quantized, under --as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptmap

FILE = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj"
CASES = ("asym-4", "asym-3-axis", "no-clipping-4", "dynamic-asym-4", "sym-8")


def config(case: str) -> Any:
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
    )
    from torchao.quantization.quant_primitives import MappingType

    if case == "dynamic-asym-4":
        return Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4,
            weight_granularity=PerGroup(32),
            weight_mapping_type=MappingType.ASYMMETRIC,
        )
    dtype, granularity, mapping = {
        "asym-4": (torch.int4, PerGroup(32), MappingType.ASYMMETRIC),
        "asym-3-axis": (torch.int3, PerAxis(0), MappingType.ASYMMETRIC),
        "no-clipping-4": (torch.int4, PerGroup(32), MappingType.SYMMETRIC_NO_CLIPPING_ERR),
        "sym-8": (torch.int8, PerGroup(32), MappingType.SYMMETRIC),
    }[case]
    return IntxWeightOnlyConfig(dtype, granularity, mapping_type=mapping)


def released(case: str, folder: Path) -> tuple[Path, Any]:
    """The directory that transformers saves, and the model that it saved."""
    from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(llama).bfloat16().save_pretrained(folder / "dense")
    model = LlamaForCausalLM.from_pretrained(
        folder / "dense", quantization_config=TorchAoConfig(config(case)), dtype=torch.bfloat16
    )
    model.save_pretrained(folder / "release")
    return folder / "release", model


@pytest.mark.parametrize("case", CASES)
def test_given_back_as_it_was(case: str, tmp_path: Path) -> None:
    """By way of bf16, in which torchao's own dequantization gives the same values; zero points included."""
    release, model = released(case, tmp_path)
    given = load_file(release / FILE)
    zeros = given[f"{DOWN}._weight_zero_point"]
    assert bool(zeros.any()) is case.startswith(("asym", "dynamic"))
    ckptmap.convert(release, tmp_path / "work.pt", to="full-bf16")
    state = torch.load(tmp_path / "work.pt")
    own = model.get_submodule(DOWN).weight.dequantize()
    assert torch.equal(state[f"{DOWN}.weight"], own)
    report = ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=release)
    assert report.likeness is not None
    assert not report.likeness.changed
    got = load_file(tmp_path / "back" / FILE)
    assert given.keys() == got.keys()
    assert all(torch.equal(given[key], got[key]) for key in given)
    assert (tmp_path / "back" / "config.json").read_bytes() == (
        release / "config.json"
    ).read_bytes()


def test_a_changed_weight_is_refused_with_the_reason(tmp_path: Path) -> None:
    release, _ = released("asym-4", tmp_path)
    ckptmap.convert(release, tmp_path / "work.pt", to="full-bf16")
    state = torch.load(tmp_path / "work.pt")
    state[f"{DOWN}.weight"] = state[f"{DOWN}.weight"].flip(0) * 2
    torch.save(state, tmp_path / "trained.pt")
    with pytest.raises(ckptmap.CkptmapError, match="does not state the mapping_type") as caught:
        ckptmap.convert(tmp_path / "trained.pt", tmp_path / "back", as_=release)
    assert caught.value.message.startswith(f"{DOWN}.weight: has changed")
    assert "--to hf-bf16" in str(caught.value.hint)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "back").exists()
