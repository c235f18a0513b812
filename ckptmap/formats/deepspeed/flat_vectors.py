"""Cut parameters out of the flat vectors of the ranks, in which ZeRO keeps weights and moments.

    stages 1, 2   one vector a parameter group, cut over the ranks: parameters follow each other, and
                  may begin on one rank and end on another
    stage 3       each parameter is cut over the ranks; a rank's vector holds its shares one by one

Both are lists of pieces: elements of a parameter that lie together in the vector of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptmap.errors import SourceError
from ckptmap.sharding.flat_range_boxes import rectangles
from ckptmap.tensors import Chunk, Region, StoredTensor, TensorInfo


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """Elements [start, start + numel) of a flattened parameter: elements `at` and after of a rank's vector."""

    rank: int
    at: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A parameter: its FQN and shape, the number of its vector, and the pieces that tile it in order."""

    fqn: str
    shape: tuple[int, ...]
    vector: int
    pieces: tuple[FlatSpan, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def tensor(self, vectors: Sequence[StoredTensor | None], share: object = None) -> StoredTensor:
        """Return the parameter, or a moment of it, from the vectors of the ranks."""
        first = next(vector for vector in vectors if vector is not None)
        info = TensorInfo(self.shape, first.info.dtype)
        return StoredTensor(info, lambda: list(self._chunks(vectors, info)), share=share)

    def _chunks(self, vectors: Sequence[StoredTensor | None], info: TensorInfo) -> Iterator[Chunk]:
        for piece in self.pieces:
            vector = vectors[piece.rank]
            assert vector is not None, f"{self.fqn}: rank {piece.rank} holds a piece of it"
            (held,) = vector.chunks
            if not held.region.is_contiguous:
                raise SourceError(
                    "CKM112",
                    f"{held.region.file}: the vector that holds {self.fqn} is a strided view",
                    "save the checkpoint again",
                )
            base = held.region.offset + (piece.at - piece.start) * info.itemsize
            for box, at in rectangles(self.shape, piece.start, piece.start + piece.numel):
                offset = base + at * info.itemsize
                region = Region.contiguous(held.region.file, offset, box.sizes, info.itemsize)
                yield Chunk(box, region)


def along_ranks(offset: int, numel: int, counts: Sequence[int]) -> Iterator[FlatSpan]:
    """Yield the pieces of the elements [offset, offset + numel) of a vector of which rank r holds
    `counts[r]` elements."""
    begin = 0
    for rank, count in enumerate(counts):
        low, high = max(offset, begin), min(offset + numel, begin + count)
        if low < high:
            yield FlatSpan(rank, low - begin, low - offset, high - low)
        begin += count


def over_ranks(offset: int, numel: int, world: int) -> Iterator[FlatSpan]:
    """Yield the pieces of a parameter of which each rank holds ceil(numel / world) elements from element
    `offset` of its vector on; the last ones may be padding."""
    share = -(-numel // world)
    for rank in range(world):
        count = min(share, numel - rank * share)
        if count > 0:
            yield FlatSpan(rank, offset, rank * share, count)
