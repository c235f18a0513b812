"""Are the shards of all ranks here? What DCP in safetensors form itself tells, which is not much.

torch writes neither how many ranks there were nor a tensor's shape (hf_storage.py, torch 2.13: the
header has `saved_offsets` alone, an index is written for consolidated files only). What is left:

- a tensor that ends inside a rank's part, or before the last rank, bounds the ranks: 1001 rows in
  parts of 501 and 500 are of 2 ranks, neither more nor less;
- the consolidated files that torch writes around `sharded/` have the shapes;
- norms have as many elements as the matrices that they feed have columns, and only rows are cut: if
  the last rank's file is missing, all norms are shorter, and the matrices' columns are not.

Where every tensor is cut evenly and nothing contradicts it, a missing last rank cannot be told from
a save of one rank less, and a note says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.tensors import Chunk, TensorInfo

MIN_NORMS = 2
"""Vectors that must agree before they speak against the matrices."""


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk and the rank, counted from 0, whose file holds it."""

    rank: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor that ranks 0, 1, ... hold `step` rows each of; `ends`: there are no more rows."""

    count: int
    step: int
    ends: bool

    def ranks(self) -> tuple[int, int | None]:
        """Fewest and most ranks that torch.chunk gives such parts for; None: any number."""
        fewest = -(-self.count // self.step)
        if not self.ends or self.step == 1:
            return fewest, None
        return fewest, -(-self.count // (self.step - 1)) - 1


def rows_of(info: TensorInfo, parts: Sequence[Part], ranks: int) -> Rows | None:
    """None where it is cut in another way than by rows, a rank each, as Shard(0) over one mesh dim."""
    ordered = sorted(parts, key=lambda part: part.rank)
    if not info.shape or [part.rank for part in ordered] != list(range(len(parts))):
        return None
    sizes = [part.chunk.box.sizes for part in ordered]
    if any(size[1:] != info.shape[1:] for size in sizes):
        return None
    step, last = sizes[0][0], sizes[-1][0]
    if not step or any(size[0] != step for size in sizes[:-1]):
        return None
    return Rows(info.shape[0], step, last < step or len(parts) < ranks)


def is_proven(rows: Iterable[Rows], ranks: int) -> bool:
    """Can they be of no more ranks than these?"""
    most = [found.ranks()[1] for found in rows]
    return min((n for n in most if n is not None), default=0) == ranks


def contradiction(
    infos: Mapping[str, TensorInfo], rows: Mapping[str, Rows]
) -> tuple[str, int] | None:
    """(a norm, the columns of most matrices) where norms lack exactly one rank's part of them."""
    columns = Counter(info.shape[1] for info in infos.values() if len(info.shape) == 2)
    norms = {
        key: found
        for key, found in rows.items()
        if len(infos[key].shape) == 1 and key.endswith("weight") and not found.ends
    }
    if len(norms) < MIN_NORMS or not columns or any(n.count in columns for n in norms.values()):
        return None
    wide = columns.most_common(1)[0][0]
    for found in norms.values():
        if not found.count < wide <= found.count + found.step or len(set(norms.values())) > 1:
            return None
    return next(iter(norms)), wide
