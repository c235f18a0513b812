"""Parts of tensors and of files: boxes of elements, regions of bytes, and the chunks that join them.

Sizes and offsets count elements. `nbytes`, and the `offset` and `strides` of a region, count bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

# Element size in bytes of every dtype that torch or safetensors can store, by torch's name.
ITEMSIZE: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "complex32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip

FLOATING = frozenset(
    name for name in ITEMSIZE if name.startswith(("float", "bfloat")) and name != "float4_e2m1fn_x2"
)

# Boxes, regions, chunks and extents are tuples, because there may be 100,000 of each, and a frozen
# dataclass takes four times as long to create.


class Box(NamedTuple):
    """A rectangular part of a tensor: `offsets` and `sizes` in elements, one each for each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return _whole(tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Return whether the box is not empty and lies inside a tensor of this shape."""
        for offset, size, limit in zip(self.offsets, self.sizes, shape, strict=True):
            if offset < 0 or size <= 0 or offset + size > limit:
                return False
        return True

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements that both share, in the same coordinates, or None."""
        lows = []
        sizes = []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low = a if a > b else b
            size = (a + n if a + n < b + m else b + m) - low
            if size <= 0:
                return None
            lows.append(low)
            sizes.append(size)
        return Box(tuple(lows), tuple(sizes))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the same box in the coordinates of a tensor that starts at `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor, cached: most tensors of a model have one of few shapes."""
    return Box((0,) * len(shape), shape)


def contiguous_strides(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the row-major strides in bytes: sizes [2, 3], itemsize 4 -> (12, 4)."""
    return _strides(tuple(sizes), itemsize)


@lru_cache(maxsize=4096)
def _strides(sizes: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def _reach(sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    if 0 in sizes:
        return 0
    return itemsize + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


class Region(NamedTuple):
    """A strided rectangle of elements inside one file: `strides` in bytes, one for each dim."""

    file: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def contiguous(cls, file: str, offset: int, sizes: Sequence[int], itemsize: int) -> Region:
        return cls(file, offset, tuple(sizes), contiguous_strides(sizes, itemsize), itemsize)

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize

    @property
    def span_nbytes(self) -> int:
        """Bytes from the first element's first byte to the last element's last."""
        return _reach(self.sizes, self.strides, self.itemsize)

    @property
    def is_contiguous(self) -> bool:
        if self.strides == contiguous_strides(self.sizes, self.itemsize):
            return True
        expected = self.itemsize
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def crop(self, box: Box) -> Region:
        """Return the region of the part `box`, whose offsets are relative to this region."""
        start = sum(o * s for o, s in zip(box.offsets, self.strides, strict=True))
        return Region(self.file, self.offset + start, box.sizes, self.strides, self.itemsize)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The shape and dtype of a tensor; the dtype is torch's name for it (`"bfloat16"`)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Chunk(NamedTuple):
    """A stored part of a tensor: its box, and the region of a file that holds its bytes.

    `crc32` is the checksum that the file format states for exactly these bytes, else None.
    """

    box: Box
    region: Region
    crc32: int | None = None


class Extent(NamedTuple):
    """The place of a tensor whose bytes are contiguous in one file, from byte `offset` on: that of
    nearly every tensor. `crc32` is as in a Chunk."""

    file: str
    offset: int
    crc32: int | None = None
