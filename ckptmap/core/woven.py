"""Stored tensors that are put together of parts of others: fused, split, rearranged.

They are moved as bytes, box by box, like any other: a box of one is traced to strided regions of
the files that hold its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from ckptmap.core.lattice import Lattice, Piece
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo, contiguous_strides

ZEROS = ""
"""The file of a region that lies in none: its bytes are zero."""
FEW = 8
"""Up to here all strands are looked at."""


@dataclass(frozen=True)
class Strand:
    """Elements of one region of a file, and the lattice of the tensor that they fill: axis k of
    the region is axis k of the lattice."""

    lattice: Lattice
    region: Region


class Landing(NamedTuple):
    """Elements of a file that go to places in a row-major buffer: `offset` and `start` in bytes,
    for each axis (size, bytes between elements in the file, in the buffer)."""

    file: str
    offset: int
    start: int
    dims: tuple[tuple[int, int, int], ...]
    nbytes: int


class Chunks(Sequence[Chunk]):
    """Chunks that are made when first looked at: asking where a tensor lies costs nothing."""

    __slots__ = ("_found", "_make")

    def __init__(self, make: Callable[[], Sequence[Chunk]]) -> None:
        self._make = make
        self._found: Sequence[Chunk] | None = None

    def _all(self) -> Sequence[Chunk]:
        if self._found is None:
            self._found = self._make()
        return self._found

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


class Pieced(StoredTensor):
    """Parts of other tensors, each a box of this one; `sources` are those tensors, whole."""

    __slots__ = ("sources",)

    def __init__(
        self,
        info: TensorInfo,
        chunks: Callable[[], Sequence[Chunk]],
        sources: Sequence[StoredTensor],
    ) -> None:
        super().__init__(info, Chunks(chunks))
        self.sources = tuple(sources)


class Woven(Pieced):
    """Parts of other tensors, whose elements lie between each other in this one.

    `chunks` are there for who can think in boxes only: often one a row.
    """

    __slots__ = ("_found", "_make")

    def __init__(
        self,
        info: TensorInfo,
        strands: Callable[[], Sequence[Strand]],
        sources: Sequence[StoredTensor],
    ) -> None:
        super().__init__(info, self._boxes, sources)
        self._make = strands
        self._found: Sequence[Strand] | None = None

    @property
    def strands(self) -> Sequence[Strand]:
        """Found when first asked for, in the order of where they begin."""
        if self._found is None:
            self._found = sorted(self._make(), key=lambda strand: strand.lattice.offsets)
        return self._found

    @property
    def extent(self) -> None:
        return None

    def _boxes(self) -> list[Chunk]:
        return [chunk for strand in self.strands for chunk in boxes(strand)]

    def landings(self, box: Box) -> Iterator[Landing]:
        """What fills a box, a row-major buffer of it being the place."""
        itemsize = self.info.itemsize
        strides = contiguous_strides(box.sizes, itemsize)
        for strand in self._near(box):
            lattice, region = strand.lattice, strand.region
            for lows, counts in lattice.cut(box):
                offset, start, nbytes = region.offset, 0, itemsize
                dims = []
                for k, (low, n) in enumerate(zip(lows, counts, strict=True)):
                    offset += low * region.strides[k]
                    nbytes *= n
                    if n > 1:
                        step = strides[lattice.dims[k]] * lattice.steps[k]
                        dims.append((n, region.strides[k], step))
                for d, at in enumerate(lattice.crop(lows, counts).offsets):
                    start += (at - box.offsets[d]) * strides[d]
                yield Landing(region.file, offset, start, tuple(dims), nbytes)

    def _near(self, box: Box) -> Sequence[Strand]:
        strands = self.strands
        if len(strands) <= FEW or not box.sizes:
            return strands
        return [s for s in strands if s.lattice.bounds.intersect(box) is not None]


def boxes(strand: Strand) -> Iterator[Chunk]:
    """The same elements as rectangles of the tensor."""
    lattice, region = strand.lattice, strand.region
    for lows, counts in lattice.boxes():
        part = lattice.crop(lows, counts)
        offset = region.offset + sum(a * b for a, b in zip(lows, region.strides, strict=True))
        sizes = part.bounds.sizes
        strides = list(contiguous_strides(sizes, region.itemsize))
        for k, (n, dim) in enumerate(zip(counts, part.dims, strict=True)):
            if n > 1:
                strides[dim] = region.strides[k]
        yield Chunk(
            part.bounds, Region(region.file, offset, sizes, tuple(strides), region.itemsize)
        )


def woven(
    info: TensorInfo,
    pieces: Sequence[Piece],
    sources: Mapping[str, StoredTensor],
    zeros: Box | None = None,
) -> Pieced:
    """The tensor that pieces of stored tensors make; `zeros` is the box that none of them fills."""

    def strands() -> list[Strand]:
        found = [s for piece in pieces for s in _strands(piece, sources[piece.source])]
        if zeros is not None:
            nothing = (0,) * len(zeros.sizes)
            region = Region(ZEROS, 0, zeros.sizes, nothing, info.itemsize)
            found.append(Strand(Lattice.of_box(zeros), region))
        return found

    used = [sources[name] for name in dict.fromkeys(piece.source for piece in pieces)]
    if zeros is None and all(piece.dst.is_box for piece in pieces):
        return Pieced(info, lambda: [c for strand in strands() for c in boxes(strand)], used)
    return Woven(info, strands, used)


def _strands(piece: Piece, stored: StoredTensor) -> Iterator[Strand]:
    """The elements of a piece, chunk by chunk of its source."""
    for chunk in stored.near(piece.src.bounds):
        region = chunk.region
        for lows, counts in piece.src.cut(chunk.box):
            src = piece.src.crop(lows, counts)
            offset = region.offset
            for at, origin, stride in zip(
                src.offsets, chunk.box.offsets, region.strides, strict=True
            ):
                offset += (at - origin) * stride
            strides = tuple(
                step * region.strides[dim] for dim, step in zip(src.dims, src.steps, strict=True)
            )
            yield Strand(
                piece.dst.crop(lows, counts),
                Region(region.file, offset, counts, strides, region.itemsize),
            )
