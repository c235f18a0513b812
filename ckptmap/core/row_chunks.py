"""The chunks of a tensor that is cut along dim 0 over many ranks' files, as columns.

    rank r    [4 of 1024, cols]    at byte offsets[r] of files[r]    rows bounds[r] to bounds[r + 1]

256 ranks make 256 chunks of every tensor, so a Chunk is created only when one is indexed. Reading
whole rows creates none: see `reads`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import overload

from ckptmap.tensors import Box, Chunk, Region, TensorInfo


class RowChunks(Sequence[Chunk]):
    """Chunks of whole rows, from row 0 to the last; each is contiguous in its file, none is empty.

    bounds   the first row of each chunk, and the end of the last one
    crc32    returns the checksum that the file format states for exactly the bytes of chunk i,
             or None
    """

    __slots__ = ("_crc32", "_info", "bounds", "files", "offsets", "row_nbytes")

    def __init__(
        self,
        info: TensorInfo,
        bounds: Sequence[int],
        files: Sequence[str],
        offsets: Sequence[int],
        crc32: Callable[[int], int | None],
    ) -> None:
        assert len(bounds) == len(files) + 1 == len(offsets) + 1
        self._info, self._crc32 = info, crc32
        self.bounds, self.files, self.offsets = bounds, files, offsets
        self.row_nbytes = prod(info.shape[1:]) * info.itemsize

    @classmethod
    def of(cls, info: TensorInfo, chunks: Sequence[Chunk]) -> RowChunks | None:
        """Return these chunks as columns; None if there are fewer than two, or if they are not
        contiguous whole rows in order."""
        bounds, shape = [0], info.shape
        if len(chunks) < 2 or not shape:
            return None
        for box, region, _ in chunks:
            if box.offsets[0] != bounds[-1] or box.sizes[1:] != shape[1:] or not box.sizes[0]:
                return None
            if not region.is_contiguous or any(box.offsets[1:]):
                return None
            bounds.append(bounds[-1] + box.sizes[0])
        crcs = [crc32 for _, _, crc32 in chunks]
        files = tuple([region.file for _, region, _ in chunks])
        offsets = array("Q", [region.offset for _, region, _ in chunks])
        return cls(info, bounds, files, offsets, crcs.__getitem__)

    def ends(self) -> Iterator[tuple[str, int]]:
        """Yield the file of each chunk, and the byte at which the chunk ends in it."""
        starts, n = self.bounds, self.row_nbytes
        for file, offset, start, stop in zip(
            self.files, self.offsets, starts, starts[1:], strict=False
        ):
            yield file, offset + (stop - start) * n

    def reads(self, row: int, rows: int, out: memoryview) -> list[tuple[str, int, memoryview]]:
        """Return the reads (file, offset, buffer) that fill `out` with `rows` rows from `row`."""
        first = bisect_right(self.bounds, row) - 1
        stop = bisect_left(self.bounds, row + rows)
        at = [(bound - row) * self.row_nbytes for bound in self.bounds[first : stop + 1]]
        offsets = list(self.offsets[first:stop])
        if at and at[0] < 0:  # `row` lies inside the first chunk
            offsets[0] -= at[0]
            at[0] = 0
        places = [out[a:b] for a, b in pairwise(at)]  # slicing ends the last one with `out`
        return list(zip(self.files[first:stop], offsets, places, strict=True))

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        info, index = self._info, range(len(self))[index]
        start, stop = self.bounds[index : index + 2]
        sizes = (stop - start, *info.shape[1:])
        box = Box((start, *(0,) * len(info.shape[1:])), sizes)
        region = Region.contiguous(self.files[index], self.offsets[index], sizes, info.itemsize)
        return Chunk(box, region, self._crc32(index))
