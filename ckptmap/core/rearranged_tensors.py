"""Tensors made of parts of other stored tensors: fused, split, or with their axes rearranged.

Nothing is computed for them: a box of such a tensor is traced back to strided regions of the files
that hold its sources, and those bytes are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from ckptmap.core.strided_boxes import Piece, StridedBox
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo, contiguous_strides

ZEROS = ""
"""The `file` of a region that lies in no file: all its bytes are zero."""
FEW = 8
"""Up to this number of regions, all are visited, not only those near a box."""


@dataclass(frozen=True)
class StridedRegion:
    """The elements of one region of a file, and their place in the tensor.

    Axis k of the region is axis k of the place.
    """

    place: StridedBox
    region: Region


class StridedCopy(NamedTuple):
    """A copy of strided elements of a file into a row-major buffer.

    offset  byte of the first element in the file
    start   byte of the first element in the buffer
    dims    for each axis (size, bytes between elements in the file, bytes between in the buffer)
    nbytes  bytes of all elements
    """

    file: str
    offset: int
    start: int
    dims: tuple[tuple[int, int, int], ...]
    nbytes: int


class LazyChunks(Sequence[Chunk]):
    """A sequence of chunks that is computed when it is first used."""

    __slots__ = ("_chunks", "_make")

    def __init__(self, make: Callable[[], Sequence[Chunk]]) -> None:
        self._make = make
        self._chunks: Sequence[Chunk] | None = None

    def _all(self) -> Sequence[Chunk]:
        if self._chunks is None:
            self._chunks = self._make()
        return self._chunks

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


class Assembled(StoredTensor):
    """A tensor made of boxes of other tensors; `sources` are those other tensors, whole."""

    __slots__ = ("sources",)

    def __init__(
        self,
        info: TensorInfo,
        chunks: Callable[[], Sequence[Chunk]],
        sources: Sequence[StoredTensor],
    ) -> None:
        super().__init__(info, LazyChunks(chunks))
        self.sources = tuple(sources)


class Rearranged(Assembled):
    """A tensor made of strided parts of others, whose elements alternate, as rotary pairs do.

    `regions` describe it. `chunks` describe the same in plain boxes, often one for each row.
    """

    __slots__ = ("_make", "_sorted_regions")

    def __init__(
        self,
        info: TensorInfo,
        regions: Callable[[], Sequence[StridedRegion]],
        sources: Sequence[StoredTensor],
    ) -> None:
        super().__init__(info, self._boxes, sources)
        self._make = regions
        self._sorted_regions: Sequence[StridedRegion] | None = None

    @property
    def regions(self) -> Sequence[StridedRegion]:
        """The strided regions that tile the tensor, sorted by their first element."""
        if self._sorted_regions is None:
            self._sorted_regions = sorted(self._make(), key=lambda part: part.place.offsets)
        return self._sorted_regions

    @property
    def extent(self) -> None:
        return None

    def _boxes(self) -> list[Chunk]:
        return [chunk for part in self.regions for chunk in boxes(part)]

    def copies(self, box: Box) -> Iterator[StridedCopy]:
        """Yield the copies that fill a row-major buffer of `box`."""
        itemsize = self.info.itemsize
        strides = contiguous_strides(box.sizes, itemsize)
        for part in self._near(box):
            place, region = part.place, part.region
            for starts, counts in place.cut(box):
                offset, start, nbytes = region.offset, 0, itemsize
                dims = []
                for k, (first, n) in enumerate(zip(starts, counts, strict=True)):
                    offset += first * region.strides[k]
                    nbytes *= n
                    if n > 1:
                        step = strides[place.dims[k]] * place.steps[k]
                        dims.append((n, region.strides[k], step))
                for d, at in enumerate(place.crop(starts, counts).offsets):
                    start += (at - box.offsets[d]) * strides[d]
                yield StridedCopy(region.file, offset, start, tuple(dims), nbytes)

    def _near(self, box: Box) -> Sequence[StridedRegion]:
        regions = self.regions
        if len(regions) <= FEW or not box.sizes:
            return regions
        return [s for s in regions if s.place.bounds.intersect(box) is not None]


def boxes(source: StridedRegion) -> Iterator[Chunk]:
    """Yield the elements of a strided region as chunks, each a plain box of the tensor."""
    place, region = source.place, source.region
    for starts, counts in place.boxes():
        piece = place.crop(starts, counts)
        offset = region.offset + sum(a * b for a, b in zip(starts, region.strides, strict=True))
        sizes = piece.bounds.sizes
        strides = list(contiguous_strides(sizes, region.itemsize))
        for k, (n, dim) in enumerate(zip(counts, piece.dims, strict=True)):
            if n > 1:
                strides[dim] = region.strides[k]
        yield Chunk(
            piece.bounds, Region(region.file, offset, sizes, tuple(strides), region.itemsize)
        )


def rearranged(
    info: TensorInfo,
    pieces: Sequence[Piece],
    sources: Mapping[str, StoredTensor],
    zeros: Box | None = None,
) -> Assembled:
    """Return the tensor that is made of `pieces` of the stored tensors `sources`.

    `zeros` is a box that no piece fills: its elements are zero.
    """

    def regions() -> list[StridedRegion]:
        strided = [s for piece in pieces for s in _regions(piece, sources[piece.source])]
        if zeros is not None:
            nothing = (0,) * len(zeros.sizes)
            region = Region(ZEROS, 0, zeros.sizes, nothing, info.itemsize)
            strided.append(StridedRegion(StridedBox.of_box(zeros), region))
        return strided

    used = [sources[name] for name in dict.fromkeys(piece.source for piece in pieces)]
    if zeros is None and all(piece.dst.is_box for piece in pieces):
        return Assembled(info, lambda: [c for part in regions() for c in boxes(part)], used)
    return Rearranged(info, regions, used)


def _regions(piece: Piece, stored: StoredTensor) -> Iterator[StridedRegion]:
    """Yield the strided regions of a piece, for one chunk of its source after the other."""
    for chunk in stored.near(piece.src.bounds):
        region = chunk.region
        for starts, counts in piece.src.cut(chunk.box):
            src = piece.src.crop(starts, counts)
            offset = region.offset
            for at, origin, stride in zip(
                src.offsets, chunk.box.offsets, region.strides, strict=True
            ):
                offset += (at - origin) * stride
            strides = tuple(
                step * region.strides[dim] for dim, step in zip(src.dims, src.steps, strict=True)
            )
            yield StridedRegion(
                piece.dst.crop(starts, counts),
                Region(region.file, offset, counts, strides, region.itemsize),
            )
