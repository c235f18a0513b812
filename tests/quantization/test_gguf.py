"""Blocks of ggml decode to the bits of `gguf.quants.dequantize`, in whole, in boxes, and in every chunk size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from ckptmap.errors import RunError, SourceError
from ckptmap.formats.gguf.block_types import BY_NAME
from ckptmap.protocols import Refusal
from ckptmap.quantization.blockwise.chunks import smaller_chunks
from ckptmap.quantization.dense import Dense
from ckptmap.quantization.gguf.encoders import ENCODERS
from ckptmap.quantization.gguf.encoding import GgufBlocks, record
from ckptmap.quantization.gguf.scheme import GgufScheme
from ckptmap.tensors import Box, Extent, StoredTensor, TensorInfo
from tests.support.bnb_cases import refused
from tests.support.gguf_files import ENCODED, blocks, dequantized


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of each value; those of a NaN are all alike."""
    return values.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found.isnan() == expected.isnan()).all()) and torch.equal(
        bits(found), bits(expected)
    )


def test_the_types_are_those_of_the_gguf_package() -> None:
    theirs = {each.name: (int(each), *sizes) for each, sizes in GGML_QUANT_SIZES.items()}
    assert {n: (t.number, t.numel, t.nbytes) for n, t in BY_NAME.items()} == theirs
    assert {each.name for each in quants._type_traits} == {*ENCODED, "BF16"}
    decoded = {name for name, kind in BY_NAME.items() if kind.decoded and not kind.dtype}
    assert decoded == set(ENCODED)


def decoded(kind: str, raw: np.ndarray, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    encoding, info = GgufBlocks(kind), TensorInfo(shape, "float32")
    part = encoding.part_box(info, "", box)
    assert part is not None
    at = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
    out = torch.empty(box.sizes)
    encoding.decode(info, {"": torch.from_numpy(raw)[at]}, box, out)
    return out


@pytest.mark.parametrize("kind", ENCODED)
def test_all_codes_and_scales(kind: str) -> None:
    """Random bytes: every code, scales that are zero, subnormal, infinite and NaN."""
    shape = (300, 512)
    raw = blocks(kind, shape)
    raw[0], raw[1] = 0, 255
    expected = dequantized(kind, raw)
    assert same(decoded(kind, raw, shape, Box.whole(shape)), expected)
    with smaller_chunks(20):
        assert same(decoded(kind, raw[:2], (2, 512), Box.whole((2, 512))), expected[:2])


@pytest.mark.parametrize("kind", ENCODED)
def test_any_box(kind: str) -> None:
    shape = (2, 3, 768)
    raw = blocks(kind, shape, 1)
    expected = dequantized(kind, raw)
    for offsets, sizes in (((0, 1, 0), (2, 2, 768)), ((1, 0, 5), (1, 3, 700)), ((0, 0, 256), (2, 3, 256)),
                           ((1, 2, 767), (1, 1, 1)), ((0, 0, 300), (0, 3, 9))):  # fmt: skip
        at = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        assert same(decoded(kind, raw, shape, Box(offsets, sizes)), expected[at])
    out = torch.empty(768, 3).t()  # not contiguous
    encoding, info = GgufBlocks(kind), TensorInfo((3, 768), "float32")
    encoding.decode(info, {"": torch.from_numpy(raw[0])}, Box.whole((3, 768)), out)
    assert same(out.contiguous(), expected[0])


def test_what_it_cannot_hold() -> None:
    encoding = GgufBlocks("Q4_K")
    for info in (
        TensorInfo((4, 100), "float32"), TensorInfo((), "float32"), TensorInfo((256,), "int8")
    ):  # fmt: skip
        assert isinstance(encoding.parts(info), Refusal)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"type": "Q8_K"}, "gguf record"),
        ({"type": ["Q4_K"]}, "gguf record"),
        ({"version": 2}, "gguf record"),
        ({"dtype": "float16"}, "gguf record"),
        ({"shape": [2, 100]}, "which do not divide"),
        ({"shape": [2, -256]}, "expected positive sizes"),
        ({"shape": [3, 256]}, "uint8"),
    ],
)
def test_records_that_do_not_fit(change: dict[str, object], match: str) -> None:
    stored = {"w": StoredTensor(TensorInfo((2, 144), "uint8"), Extent("f", 0, None))}
    good = record("Q4_K", (2, 256))
    ((group, keys),) = GgufScheme().group(stored, {"w": good})
    assert (group.info, keys) == (TensorInfo((2, 256), "float32"), ("w",))
    with refused(SourceError, "CKM115", match=match):
        GgufScheme().group(stored, {"w": {**good, **change}})


def encoded(kind: str, values: torch.Tensor, feed: int) -> np.ndarray:
    encoder = GgufBlocks(kind).encoder(TensorInfo(tuple(values.shape), "float32"), "cpu")
    out = torch.zeros(values.numel() // encoder.step * BY_NAME[kind].nbytes, dtype=torch.uint8)
    flat = values.reshape(-1)
    for at in range(0, flat.numel(), feed):
        for write in encoder.feed(at, flat[at : at + feed]):
            (start,), (count,) = write.box.offsets, write.box.sizes
            out[start : start + count] = write.values
    assert list(encoder.finish()) == []
    return out.view(values.shape[0], -1).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ENCODERS)
def test_encoded_as_the_gguf_package_does(kind: str, dtype: torch.dtype) -> None:
    """Blocks of all magnitudes, of zeros, of one value, of ties, and of values that the codes hold already."""
    torch.manual_seed(0)
    values = torch.randn(64, 256) * torch.logspace(-6, 3, 64).unsqueeze(1)
    values[0], values[1], values[2] = 0.0, 3.0, -3.0
    values[3] = torch.arange(256) / 2 - 64
    values[4] = (
        dequantized(kind, blocks(kind, (1, 256))[:1]).nan_to_num(0, 0, 0).clamp(-1e4, 1e4)[0]
    )
    values = values.to(dtype)
    expected = quants.quantize(values.float().numpy(), GGMLQuantizationType[kind])
    assert np.array_equal(encoded(kind, values, 64 * 256), expected)
    assert np.array_equal(encoded(kind, values, 96), expected)


@pytest.mark.parametrize("kind", ENCODERS)
def test_values_that_no_scale_holds(kind: str) -> None:
    for value in (torch.nan, torch.inf, 1e9 if kind != "MXFP4" else -torch.inf):
        values = torch.ones(1, 64)
        values[0, 40] = value
        with refused(RunError, "CKM309", match="found others"):
            encoded(kind, values, 64)


def test_changed_values_of_other_types_become_dense() -> None:
    for kind in ENCODED:
        assert GgufBlocks(kind).afresh() == (GgufBlocks(kind) if kind in ENCODERS else Dense())
