"""Weights and NF4 parts that the NF4 tests share, with torchao's own module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ckptmap.protocols import Refusal
from ckptmap.quantization.nf4.encoding import NF4, PARTS, NF4Encoder, default_encoding
from ckptmap.tensors import Box, TensorInfo
from tests.support.library import Library

MODULE = Library("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Parts = Mapping[str, torch.Tensor]


def weights(shape: tuple[int, ...], dtype: torch.dtype, kind: str = "normal") -> torch.Tensor:
    torch.manual_seed(math.prod(shape))
    w = torch.randn(shape) * 0.02
    if kind == "heavy":
        w = w * torch.randn(shape[0], *[1] * (len(shape) - 1)).exp() * torch.randn(shape).exp()
    if kind == "tiny":
        w = w * 1e-5  # subnormal in fp16
    return w.to(dtype)


def info_of(w: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(w.shape), str(w.dtype).removeprefix("torch."))


def quantize(
    w: torch.Tensor, encoding: NF4 | None = None, split: int | None = None
) -> tuple[dict[str, torch.Tensor], NF4Encoder]:
    """All parts, each element written exactly once."""
    info = info_of(w)
    encoding = encoding or default_encoding(info)
    expected = encoding.parts(info)
    assert not isinstance(expected, Refusal)
    parts = {k: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for k, p in expected.items()}
    end = dict.fromkeys(parts, 0)
    encoder = NF4Encoder(encoding, info, "cpu")
    flat, split = w.reshape(-1), split or w.numel()
    writes = [
        x for at in range(0, w.numel(), split) for x in encoder.feed(at, flat[at : at + split])
    ]
    for write in [*writes, *encoder.finish()]:
        (start,), (count,) = write.box.offsets, write.box.sizes
        assert start == end[write.part], "successive writes follow each other"
        assert write.values.shape == (count,) and write.values.dtype == parts[write.part].dtype
        parts[write.part].view(-1)[start : start + count] = write.values
        end[write.part] += count
    assert end == {name: part.numel() for name, part in parts.items()}
    return parts, encoder


def decode(info: TensorInfo, encoding: NF4, parts: Parts, box: Box) -> torch.Tensor:
    """The box, from parts cut as `part_box` says."""
    cut = {}
    for name, part in parts.items():
        inner = encoding.part_box(info, name, box)
        assert inner is not None
        cut[name] = part[slices(inner)].clone()
    out = torch.full(box.sizes, torch.nan, dtype=getattr(torch, info.dtype))
    encoding.decode(info, cut, box, out)
    return out


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def assert_same_parts(parts: Parts, reference: Any) -> None:
    for name in PARTS:
        wanted = getattr(reference, name)
        assert parts[name].dtype == wanted.dtype and torch.equal(parts[name], wanted), name
