"""Divisions by a number: the same bits on every device, in each registered encoder and decoder."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckptmap import registry
from ckptmap.live.optimizer import whole_blocks
from ckptmap.live.optimizer.family import codes_of
from ckptmap.optim import lowbit_codes
from ckptmap.optim.block_segments import segments_of
from ckptmap.protocols import Refusal, Scheme
from ckptmap.protocols.encodings import LooksFirst
from ckptmap.protocols.offers import offers
from ckptmap.quantization.blockwise import chunks
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.tensors import Box, TensorInfo
from ckptmap.testing import SchemeKit, encodings
from ckptmap.testing.parts import Assembly

SCHEMES = {scheme.name: scheme for scheme in registry.schemes()}


class Divisions(TorchDispatchMode):
    """Record float divisions by a number that CUDA would replace by a product with its reciprocal.

    A power of two has an exact reciprocal. A 0-dim CPU tensor counts as a number on another device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inexact: list[str] = []
        self.copies: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        if packet in (torch.ops.aten.div, torch.ops.aten.div_, torch.ops.aten.true_divide):
            self._divided(func, *args)
        if packet in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
            devices |= {torch.device((kwargs or {}).get("device") or next(iter(devices))).type}
            self.copies += [str(func)] * (len(devices) > 1)
        return func(*args, **(kwargs or {}))

    def _divided(self, func: Any, values: Any, divisor: Any, *_: Any) -> None:
        if isinstance(divisor, torch.Tensor):
            if divisor.device != values.device:
                self.inexact.append(f"{func} of {values.device} by {divisor.device}")
        elif math.frexp(abs(divisor))[0] != 0.5:
            self.inexact.append(f"{func} by {divisor}")


def test_the_mode_records_what_cuda_would_multiply() -> None:
    x, there = torch.ones(4), torch.ones(4, device="meta")
    with Divisions() as seen:
        x / 2, x / 0.25, x / torch.tensor(3.0), 3.0 / x, divide(x, 3.0), divide(there, 3.0)
    assert seen.inexact == []
    with Divisions() as seen:
        x / 3, x.clone().div_(127.5), torch.div(x, 448.0, out=x), there / torch.tensor(3.0)
    assert len(seen.inexact) == 4, seen.inexact


@pytest.mark.parametrize("name", SCHEMES)
def test_encoders_decoders_and_recoders_divide_by_no_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encodings, "SHAPES", ((64,), (16, 64)))
    kit = SchemeKit(SCHEMES[name])
    with Divisions() as seen:
        for one in kit.attempts:
            one.boxes(empty=False)
        kit.codes()
    assert seen.inexact == []


INFOS = [TensorInfo((256, 512), dtype) for dtype in ("bfloat16", "float16", "float32")]
HELD = [
    (name, info.dtype)
    for name, scheme in SCHEMES.items()
    for info in INFOS
    if scheme.suffix and not isinstance(made := scheme.encoding(info), Refusal)
    if not isinstance(made.parts(info), Refusal)
]
"""Schemes that quantize, with each dtype that they hold: torchao's MX has no float16, ggml fp32 alone."""


@pytest.mark.parametrize(("name", "dtype"), HELD)
def test_on_a_device_the_divisor_is_there_and_later_feeds_copy_nothing(
    name: str, dtype: str
) -> None:
    info = TensorInfo((256, 512), dtype)
    with Divisions() as seen:
        decode_on_meta(SCHEMES[name], info)
    assert seen.inexact == []
    encoding = SCHEMES[name].encoding(info)
    assert not isinstance(encoding, Refusal)
    encoder = encoding.encoder(info, "meta")
    values = torch.empty(info.numel, dtype=getattr(torch, dtype), device="meta")
    half = info.numel // 2 if encoder.splittable else info.numel
    if offers(encoder, LooksFirst):
        encoder.look(values)
    list(encoder.feed(0, values[:half]))
    with Divisions() as seen:
        list(encoder.feed(0, values[:half]))
    assert (seen.inexact, seen.copies) == ([], [])


def decode_on_meta(scheme: Scheme, info: TensorInfo) -> None:
    """Decode parts without values; the JSON of bitsandbytes' `quant_state` keeps its own."""
    encoding, whole = scheme.encoding(info), Box.whole(info.shape)
    assert not isinstance(encoding, Refusal)
    described = encoding.parts(info)
    assert not isinstance(described, Refusal)
    encoder, assembly = encoding.encoder(info, "cpu"), Assembly(scheme.name, described, False)
    values = torch.ones(info.numel, dtype=getattr(torch, info.dtype))
    if offers(encoder, LooksFirst):
        encoder.look(values)
    for write in (*encoder.feed(0, values), *encoder.finish()):
        assembly.take(write)
    parts = {
        name: part if "quant_state" in name else part.to("meta")
        for name, part in assembly.parts().items()
    }
    out = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
    encoding.decode(info, parts, whole, out)


@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_moments_of_an_optimizer_are_divided_by_no_number(kind: str) -> None:
    library = pytest.importorskip(f"torchao.optim.subclass_{kind[len('OptimState') :].lower()}")
    state = getattr(library, kind).zeros((64, 256))
    qmap = getattr(state, "qmap", None)
    with Divisions() as seen:
        assert lowbit_codes.encode(
            torch.rand(64, 256), state.block_size, qmap, state.codes, state.scale
        )
        lowbit_codes.decode(state.codes, state.block_size, qmap, state.scale)
    assert seen.inexact == []


@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_moments_in_blocks_that_a_shard_cuts_are_divided_by_no_number(kind: str) -> None:
    library = pytest.importorskip(f"torchao.optim.subclass_{kind[len('OptimState') :].lower()}")
    whole = codes_of(getattr(library, kind).zeros((16, 256)))
    assert whole is not None
    segments = segments_of((16, 256), Box((0, 100), (16, 64)), whole.block_size)
    part = whole.codes.view(-1)[: 16 * 64 * whole.codes.numel() // (16 * 256)]
    codes = replace(
        whole, codes=part, scale=torch.zeros(segments.count), shape=(16, 64), segments=segments
    )
    values = torch.rand(16, 64)
    with Divisions() as seen:
        whole_blocks.encode(codes, values, segments.peaks(values))
    assert seen.inexact == [] and codes.scale.any()


@pytest.mark.parametrize("number", [127.0, 127.5, 448.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_quotient_is_that_of_a_number_on_the_cpu(dtype: torch.dtype, number: float) -> None:
    bits = torch.randint(-(2**15), 2**15, (1 << 16,), dtype=torch.int16)
    x = bits.view(dtype) if dtype.itemsize == 2 else bits.to(torch.int32).bitwise_xor_(0x3F80 << 16)
    x = x.view(dtype)
    assert torch.equal(divide(x, number).nan_to_num(0.0), (x / number).nan_to_num(0.0))
    out = torch.empty_like(x)
    assert divide(x, number, out=out) is out


def test_no_fake_divisor_outlives_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_constants", {})
    with FakeTensorMode():
        divide(torch.ones(3), 5.0)
    assert chunks._constants == {}
    assert divide(torch.ones(3), 5.0).tolist() == pytest.approx([0.2] * 3)
