"""Infer from the shards of DCP in safetensors form whether those of the last rank are missing.

torch stores neither the number of ranks nor the shape of a tensor (hf_storage.py, torch 2.13: a
header holds `saved_offsets` alone, and only consolidated files get an index). Three signs are left:

- A tensor whose last chunk is shorter than the others, or that has fewer chunks than there are ranks,
  bounds the number of ranks: 1001 rows in chunks of 501 and 500 were written by exactly 2 ranks.
- The consolidated files that torch writes around `sharded/` hold the shapes (`safetensors_reader`).
- A norm has as many elements as the next matrix has columns, and Shard(0) cuts only rows. So if the
  last rank's file is missing, all norms are too short, and the matrices' columns are not.

If every tensor is cut evenly and nothing contradicts, a save that lost its last rank looks like one
of fewer ranks. The reader then adds a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.tensors import Chunk, TensorInfo

MIN_NORMS = 2
"""Number of norms that must agree before they count as a contradiction of the matrices."""


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk and the rank, counted from 0, whose file holds it."""

    rank: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class RankRows:
    """A tensor of `count` rows, of which ranks 0, 1, ... hold `step` each, the last one the rest.

    `ends` is True if the chunks prove that no further row exists.
    """

    count: int
    step: int
    ends: bool

    def ranks(self) -> tuple[int, int | None]:
        """Return the fewest and the most ranks for which `torch.chunk` cuts like this; None: no bound."""
        fewest = -(-self.count // self.step)
        if not self.ends or self.step == 1:
            return fewest, None
        return fewest, -(-self.count // (self.step - 1)) - 1


def rows_of(info: TensorInfo, parts: Sequence[Part], ranks: int) -> RankRows | None:
    """Return how the tensor is cut; None unless it is cut as Shard(0) over one mesh dimension: by rows,
    one chunk for each rank."""
    ordered = sorted(parts, key=lambda part: part.rank)
    if not info.shape or [part.rank for part in ordered] != list(range(len(parts))):
        return None
    sizes = [part.chunk.box.sizes for part in ordered]
    if any(size[1:] != info.shape[1:] for size in sizes):
        return None
    step, last = sizes[0][0], sizes[-1][0]
    if not step or any(size[0] != step for size in sizes[:-1]):
        return None
    return RankRows(info.shape[0], step, last < step or len(parts) < ranks)


def is_proven(rows: Iterable[RankRows], ranks: int) -> bool:
    """Return True if one of the tensors cannot be of more than `ranks` ranks."""
    most = [cut.ranks()[1] for cut in rows]
    return min((n for n in most if n is not None), default=0) == ranks


def contradiction(
    infos: Mapping[str, TensorInfo], rows: Mapping[str, RankRows]
) -> tuple[str, int] | None:
    """Return the key of a norm and the number of columns of most matrices, if all norms are shorter than
    that by at most one rank's chunk; None otherwise."""
    columns = Counter(info.shape[1] for info in infos.values() if len(info.shape) == 2)
    norms = {
        key: cut
        for key, cut in rows.items()
        if len(infos[key].shape) == 1 and key.endswith("weight") and not cut.ends
    }
    if len(norms) < MIN_NORMS or not columns or any(n.count in columns for n in norms.values()):
        return None
    width = columns.most_common(1)[0][0]
    for norm in norms.values():
        if not norm.count < width <= norm.count + norm.step or len(set(norms.values())) > 1:
            return None
    return next(iter(norms)), width
