"""Scales of activations are dropped, each with an entry, where their weight is no longer stored as codes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationArgs
from peft import LoraConfig, get_peft_model

import ckptmap
from tests.quantization.test_fp8_static import static
from tests.support.int8_models import QUERY, compressed, llama

LAYER = "model.layers.0."
LINEARS = [
    *(f"{LAYER}self_attn.{name}_proj." for name in "qkvo"),
    *(f"{LAYER}mlp.{name}_proj." for name in ("gate", "up", "down")),
]
PARTS = {"ct-fp8": "input_scale", "fp8": "activation_scale"}
Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    tensorwise = QuantizationArgs(num_bits=8, type="float", strategy="tensor")

    @cache
    def write(form: str) -> Path:
        path = tmp_path_factory.mktemp(form) / "in"
        if form == "fp8":
            static(path)
        else:
            compressed(path, tensorwise, "float-quantized", tensorwise)
        return path

    return write


def entries(form: str, names: list[str]) -> set[str]:
    return {f"{name}{PARTS[form]}" for name in names}


@pytest.mark.parametrize("form", PARTS)
def test_of_weights_that_an_adapter_changes(form: str, written: Written, tmp_path: Path) -> None:
    """They went without an entry: neither with their weights nor among what is dropped."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(llama(), config).save_pretrained(str(tmp_path / "adapter"))
    report = ckptmap.merge(written(form), tmp_path / "adapter", tmp_path / "out", "hf-bf16")
    assert entries(form, LINEARS) <= report.dropped.keys()
    assert report.dropped[QUERY.replace("weight", PARTS[form])] == (
        f"scales the activations of {QUERY}, which is no longer stored as {form}"
    )
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert not [fqn for fqn in ckpt if "scale" in fqn]


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("names", ["llama/torchtune", "llama/torchtitan-fused@2026-04b"])
def test_of_weights_that_another_scheme_rearranges(names: str, form: str, written: Written) -> None:
    """They are decoded to be fused; a weight that is only renamed keeps its own."""
    plan = ckptmap.plan(written(form), "full", names=names)
    kept = {key for step in plan.keys for key in map(str, step) if key.endswith(PARTS[form])}
    assert len(plan.dropped.keys() & entries(form, LINEARS)) + len(kept) == len(LINEARS), kept
    assert bool(plan.dropped) == ("fused" in names)
    assert ckptmap.plan(written(form), "full-bf16", names=names).dropped.keys() == entries(
        form, LINEARS
    )
