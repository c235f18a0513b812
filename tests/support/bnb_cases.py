"""Checkpoints that bitsandbytes itself quantized, and the values that its own formula decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.tensors import Box
from tests.support.library import Library

bnb = Library("bitsandbytes")
ops = Library("bitsandbytes.backends.default.ops")

HEAVY = 30.0
"""How far outlier columns stand out."""


def weight(
    shape: tuple[int, int], dtype: torch.dtype, seed: int = 0, outliers: bool = True
) -> Tensor:
    """Normal values with a row of zeros, a tiny row, and two columns of outliers."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    if outliers:
        w[:, :2] *= HEAVY
    w[1] = 0
    w[2] *= 1e-3
    return w.to(dtype)


def linear4bit(
    w: Tensor, kind: str, double: bool, block: int = 64, storage: torch.dtype = torch.uint8
) -> Any:
    """A Linear4bit that bitsandbytes has quantized on the CPU."""
    layer = bnb.nn.Linear4bit(
        w.shape[1], w.shape[0], bias=False, compute_dtype=w.dtype, compress_statistics=double,
        quant_type=kind, quant_storage=storage,
    )  # fmt: skip
    layer.weight = bnb.nn.Params4bit(
        w.clone(), requires_grad=False, compress_statistics=double, quant_type=kind,
        blocksize=block, quant_storage=storage, module=layer,
    )  # fmt: skip
    return layer.to("cpu")


def truth(layer: Any) -> Tensor:
    """What bitsandbytes decodes of a layer."""
    return decoded(layer.weight.data, layer.weight.quant_state)


def decoded(packed: Tensor, state: Any) -> Tensor:
    """bitsandbytes' generic formula, because its AVX512 kernel is wrong where rows are no multiple
    of the block (facts: quantized.md 1.4)."""
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    with torch.compiler.set_stance("force_eager"):
        found: Tensor = ops._dequantize_4bit_compute(
            packed.view(-1).view(torch.uint8), absmax.float(), state.code, state.blocksize,
            state.shape, state.dtype,
        )  # fmt: skip
    return found.view(state.shape)


def same(a: Tensor, b: Tensor) -> None:
    """Equal in dtype, shape and every bit."""
    assert a.dtype == b.dtype and a.shape == b.shape
    one, two = a.contiguous().view(-1), b.contiguous().view(-1)
    assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@contextmanager
def refused(
    kind: type[CkptmapError], code: str, match: str
) -> Iterator[pytest.ExceptionInfo[CkptmapError]]:
    """The block raises this error of this code, and its text says so much."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert caught.value.code == code


class Layers(nn.Module):
    """Quantized layers by name, and a norm that is not."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.norm = nn.LayerNorm(16)


def bnb_file(
    folder: Path, w: Tensor, kind: str = "nf4", double: bool = False, block: int = 64
) -> Path:
    """A checkpoint of one layer `fc`, written by bitsandbytes."""
    save_file(
        Layers({"fc": linear4bit(w, kind, double, block)}).state_dict(), folder / "b.safetensors"
    )
    return folder / "b.safetensors"


def calm(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values as of a trained layer: rows of different size, none far out, a row of zeros."""
    maker = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=maker) * torch.rand(shape[0], 1, generator=maker).add(0.5)
    w[1] = 0
    return w.mul(0.02).to(dtype)


def codes_of(path: Path, part: str) -> Tensor:
    """The packed bytes of `fc.weight`, flat."""
    with ckptmap.open(path) as ckpt:
        lazy = ckpt["fc.weight"]
        return (
            lazy.read_part(part, Box.whole(lazy.parts[part].info.shape)).view(-1).view(torch.uint8)
        )


def llama(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(7)
    return LlamaForCausalLM(config).to(dtype).eval()


def quantized(source: Path, kind: str, double: bool, **more: Any) -> Any:
    """The model at `source`, quantized by transformers through bitsandbytes."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16, **more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=torch.bfloat16
    )
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(24).view(1, 24)).logits
    return found


def decoded_weights(model: Any) -> dict[str, Tensor]:
    """FQN -> decoded weight of every quantized layer."""
    return {
        f"{name}.weight": truth(layer)
        for name, layer in model.named_modules()
        if isinstance(layer, bnb.nn.Linear4bit)
    }
