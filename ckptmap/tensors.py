"""Values that describe tensors without their data: shapes, boxes, and the places of bytes in files.

Nothing here reads a file or imports torch. `sizes` and `offsets` count elements; `nbytes`, and the
`offset` and `strides` of a region of a file, count bytes.
"""

from __future__ import annotations

import importlib
import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "BUFFERS", "FLOATING", "ITEMSIZE", "PARAMETERS", "Box", "Chunk", "Cut", "Extent", "Leaf",
    "Opaque", "Path", "PerRank", "Places", "PlainValue", "Region", "StateNote",
    "StoredTensor", "TensorInfo", "as_inert", "contiguous_strides",
]  # fmt: skip

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

BUFFERS = (
    "inv_freq", "original_inv_freq", "running_mean", "running_var", "e_score_correction_bias",
)  # fmt: skip
"""Last segments of the FQNs of buffers in every known model: floating, but never sharded."""

PARAMETERS = ("weight", "bias")
"""Last segments of the FQNs of parameters, in every known model."""

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a leaf of a nested state dict: `("model", "layers.0.weight")`."""


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


FEW_CHUNKS = 16
"""Up to this many chunks, a scan of all of them is faster than a search."""


@dataclass(frozen=True, slots=True)
class _Search:
    """Chunks sorted along the dim with the most cuts, to find those near a box by bisection."""

    dim: int
    chunks: Sequence[Chunk]
    starts: Sequence[int]
    longest: int

    @classmethod
    def over(cls, chunks: Sequence[Chunk]) -> _Search:
        ndim = len(chunks[0].box.sizes)
        dim = max(range(ndim), key=lambda d: len({chunk.box.offsets[d] for chunk in chunks}))
        ordered = sorted(chunks, key=lambda chunk: chunk.box.offsets[dim])
        longest = max(chunk.box.sizes[dim] for chunk in ordered)
        return cls(dim, ordered, [chunk.box.offsets[dim] for chunk in ordered], longest)

    def near(self, box: Box) -> Sequence[Chunk]:
        low, size = box.offsets[self.dim], box.sizes[self.dim]
        first = bisect_right(self.starts, low - self.longest)
        return self.chunks[first : bisect_left(self.starts, low + size)]


Places: TypeAlias = Extent | Sequence[Chunk]


class StoredTensor:
    """A tensor as it is stored in files: chunks that tile it, and replicas that must equal them.

    Its place is an extent, or chunks, or a function that returns one of these. The function is
    called once, when the place is first needed, because it may have to read a header.
    """

    __slots__ = ("_place", "_search", "_share", "info", "replicas")

    def __init__(
        self,
        info: TensorInfo,
        place: Places | Callable[[], Places],
        replicas: Sequence[Chunk] = (),
        share: object = None,
    ) -> None:
        self.info = info
        self._place = place
        self._search: _Search | None = None
        self.replicas = replicas if replicas == () else tuple(replicas)
        self._share = share

    @property
    def share(self) -> object:
        """A value equal for two tensors that are one view of one storage, or None: a stated tie."""
        return self._share

    @property
    def place(self) -> Places:
        """The extent or the chunks. Unlike `chunks`, this creates no chunk for an extent."""
        place = self._place
        if type(place) is Extent:
            return place
        if callable(place):
            place = self._place = place()
        return place

    @property
    def chunks(self) -> Sequence[Chunk]:
        place = self.place
        if type(place) is not Extent:
            return place  # type: ignore[return-value]
        info = self.info
        region = Region.contiguous(place.file, place.offset, info.shape, info.itemsize)
        return (Chunk(_whole(info.shape), region, place.crc32),)

    @property
    def extent(self) -> Extent | None:
        """The one extent of all bytes; None if they are in several, or not in row-major order."""
        place = self.place
        if type(place) is Extent:
            return place
        if len(place) != 1:
            return None
        box, region, crc32 = place[0]
        if box != _whole(self.info.shape) or not region.is_contiguous:
            return None
        return Extent(region.file, region.offset, crc32)

    def pieces(self, box: Box) -> Iterator[tuple[Box, Region]]:
        """Yield the regions that tile `box`, each with its box relative to `box`."""
        whole = box.sizes == self.info.shape
        for held, region, _ in self.near(box):
            if whole and held.lies_in(box.sizes):
                yield held, region
                continue
            common = held.intersect(box)
            if common is None:
                continue
            if common.sizes != held.sizes:
                region = region.crop(common.relative_to(held.offsets))
            yield common if whole else common.relative_to(box.offsets), region

    def near(self, box: Box) -> Sequence[Chunk]:
        """Return the chunks that may share elements with `box`; by a search if there are many."""
        if len(self.chunks) < FEW_CHUNKS or not box.sizes:
            return self.chunks
        if self._search is None:
            self._search = _Search.over(self.chunks)
        return self._search.near(box)

    def __repr__(self) -> str:
        return f"StoredTensor({self.info})"


@dataclass(frozen=True, eq=False)
class Opaque:
    """A pickled object as an inert record: its class is never imported or called.

    `args` are the arguments of the call that the pickle asks for, `state` the state that it would
    set (usually a dict of attributes), `info` the outer shape and dtype of a tensor subclass.
    """

    module: str
    name: str
    args: tuple[Leaf, ...] = ()
    state: Leaf = None
    info: TensorInfo | None = None

    @property
    def class_name(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_empty(self) -> bool:
        """Whether it is a tensor on the meta device: torch saves no values of such a tensor."""
        return self.class_name == "torch._utils._rebuild_meta_tensor_no_storage"

    @property
    def is_unresolved(self) -> bool:
        """Whether it is a view that torch conjugates or negates on use, and saves without that."""
        bits = self.args[-1] if self.args and self.module == "torch._utils" else None
        return isinstance(bits, dict) and bool(bits.get("conj") or bits.get("neg"))

    def __repr__(self) -> str:
        return f"<{self.class_name}>"


@dataclass(frozen=True)
class Cut:
    """A tensor whose stored chunks are objects of a tensor subclass: one NF4Tensor of each rank."""

    info: TensorInfo
    pieces: tuple[tuple[Box, Opaque], ...]


def as_inert(value: Opaque | StoredTensor) -> Opaque:
    """Return a piece of a `Cut` as an Opaque. A plain tensor becomes an Opaque whose state has the
    stored tensor under ""."""
    if isinstance(value, Opaque):
        return value
    return Opaque("torch", "Tensor", state={"": value}, info=value.info)


@dataclass(frozen=True)
class PerRank:
    """The values that the ranks of one save hold under one key, in rank order; None: no value."""

    values: Sequence[Leaf]


@dataclass(frozen=True)
class StateNote:
    """A leaf that notes how the parameters of the optimizer state beside it were named (`order`),
    or why that state cannot be used (`refused`)."""

    order: str = ""
    refused: str = ""


PlainValue: TypeAlias = (
    bool | int | float | complex | str | bytes
    | Sequence["Leaf"] | Set["Leaf"] | Mapping[Any, "Leaf"] | None
)  # fmt: skip
"""A value that is no tensor. A list, set or dict may hold other leaves."""

Leaf: TypeAlias = StoredTensor | Opaque | Cut | PerRank | StateNote | PlainValue
"""A value that a state dict holds under one path."""


def __getattr__(name: str) -> object:
    """Return `Index` from where it is now. Its old place here goes with release 0.3."""
    if name != "Index":
        raise AttributeError(f"module 'ckptmap.tensors' has no attribute {name!r}")
    warnings.warn(
        "ckptmap.tensors.Index is ckptmap.protocols.Index now", DeprecationWarning, stacklevel=2
    )
    return importlib.import_module("ckptmap.protocols").Index
