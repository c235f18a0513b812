"""Dense tensors and casts: bit-equal to torch, overflow is refused, other tensors stay as they are."""

from __future__ import annotations

import pytest
import torch

from ckptmap.errors import RunError
from ckptmap.protocols import Encoder, Refusal, Scheme
from ckptmap.quantization.dense import CastBf16, CastFp16, CastFp32, Dense, DenseAs
from ckptmap.tensors import Box, TensorInfo
from tests.conftest import Device

CASTS: tuple[Scheme, ...] = (CastBf16(), CastFp32(), CastFp16())
SOURCES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def awkward(dtype: str) -> torch.Tensor:
    """Values at every edge that fits fp16: ties, subnormals, signed zeros, NaN, infinities."""
    torch.manual_seed(0)
    edges = [0.0, -0.0, 1e-8, -6e-8, 65504.0, 65519.0, 0.1, 1 + 2**-11, 1 + 2**-8, float("nan")]
    values = torch.cat([torch.tensor([*edges, float("inf"), -float("inf")]), torch.randn(997)])
    return values.to(torch_dtype(dtype))


def fed(encoder: Encoder, values: torch.Tensor, split: int) -> torch.Tensor:
    """What comes out when `values` go in, `split` at a time, back to front."""
    pieces = {}
    for start in reversed(range(0, values.numel(), split)):
        for write in encoder.feed(start, values[start : start + split]):
            assert write.part == "" and write.box == Box((start,), (write.values.numel(),))
            pieces[start] = write.values
    assert list(encoder.finish()) == []
    return torch.cat([pieces[start] for start in sorted(pieces)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.name)
def test_a_cast_is_bit_equal_to_torch(cast: Scheme, source: str) -> None:
    values = awkward(source)
    values = values[values.float().abs() != 65536]  # what bfloat16 makes of 65504; fp16 has none
    info = TensorInfo((values.numel(),), source)
    encoding = cast.target("w", info)
    assert encoding is not None
    parts = encoding.parts(info)
    assert not isinstance(parts, Refusal)
    wanted = values.to(torch_dtype(parts[""].dtype))
    assert parts[""].shape == info.shape and encoding.record(info) is None
    assert same_bits(fed(encoding.encoder(info, "cpu"), values, 101), wanted)


@pytest.mark.parametrize("dtype", [*SOURCES, "int64", "bool", "complex64", "uint16"])
def test_dense_keeps_every_bit(dtype: str) -> None:
    values = torch.arange(960, dtype=torch.int32).view(torch.uint8)
    values = (values & 1 if dtype == "bool" else values).view(torch_dtype(dtype))
    info = TensorInfo(tuple(values.shape), dtype)
    assert same_bits(fed(Dense().encoder(info, "cpu"), values, 7), values)
    out = torch.empty_like(values)
    box = Box.whole(info.shape)
    assert Dense().part_box(info, "", box) == box
    Dense().decode(info, {"": values}, box, out)
    assert same_bits(out, values)


@pytest.mark.parametrize(
    ("cast", "source", "largest"),
    [
        (CastFp16(), "float32", 70000.0),
        (CastFp16(), "bfloat16", 65536.0),
        (CastFp16(), "float64", 65520.0),
        (CastBf16(), "float32", 3.4e38),
        (CastFp32(), "float64", 1e39),
    ],
)
def test_overflow_is_refused_with_count_and_size(cast: Scheme, source: str, largest: float) -> None:
    values = torch.zeros(1000, dtype=torch_dtype(source))
    values[[3, 500]] = torch.tensor([-largest, largest], dtype=values.dtype)
    values[7] = torch.inf
    found = float(values[500])
    info = TensorInfo((1000,), source)
    encoding = cast.target("w", info)
    assert encoding is not None
    with pytest.raises(RunError, match=r"2 finite values overflow .* found") as caught:
        fed(encoding.encoder(info, "cpu"), values, 128)
    assert caught.value.code == "CKM309" and f"{found:.6g}" in str(caught.value)


def test_infinities_and_nan_of_the_source_are_not_overflow() -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    wanted = values.to(torch.float16)
    assert same_bits(
        fed(DenseAs("float16").encoder(TensorInfo((4,), "float32"), "cpu"), values, 4), wanted
    )


@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.name)
def test_a_cast_leaves_other_dtypes_alone(cast: Scheme) -> None:
    others = "int8 uint8 int64 bool complex64 float8_e8m0fnu float4_e2m1fn_x2"
    for dtype in others.split():
        info = TensorInfo((4,), dtype)
        assert cast.target("w", info) is None, dtype
        assert isinstance(cast.encoding(info), Refusal), dtype


@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.name)
def test_the_wanted_dtype_is_plain_dense(cast: Scheme) -> None:
    dtype = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[cast.suffix]
    assert cast.target("w", TensorInfo((4,), dtype)) == Dense()


def test_feeding_stays_on_the_device(device: Device) -> None:
    info = TensorInfo((64,), "float32")
    with device.mode():
        values = torch.ones(64, device=device.name)
        (write,) = DenseAs("float16").encoder(info, device.name).feed(0, values)
        assert write.values.device.type == device.name and write.values.dtype == torch.float16
