"""Plans which boxes move between ranks: needs of all ranks -> transfers -> rounds within a byte budget.

A need is taken from the rank itself where it holds the box, else from the rank with the least to send.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptmap.errors import RunError
from ckptmap.live.state_dict.live_checkpoint import Sources
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.tensors import ITEMSIZE, Box, Path

ALIGN = 16
"""Alignment in bytes of a box in a message, so that it can be viewed in its own dtype."""


class Transfer(NamedTuple):
    """One box that moves from rank `source` to rank `target`, for need `need` of its task `unit`."""

    path: Path
    box: Box
    source: int
    target: int
    unit: int
    need: int
    nbytes: int

    @property
    def room(self) -> int:
        """Bytes of the box in a message, padding included."""
        return -(-self.nbytes // ALIGN) * ALIGN


Round = Sequence[Transfer]
Wants = Sequence[Sequence[tuple[Path, Box, bool]]]
"""Of one rank, task by task: path, box, and whether the box is kept for the step."""


def batches(
    wants: Sequence[Wants], sources: Sources, budget: int
) -> list[tuple[int, int, list[Round]]]:
    """Return (first task, end, rounds) of every batch. The boxes that a batch keeps fit the budget on
    every rank, except that a single task may exceed it. Raises RunError CKM513 where no rank holds a
    box."""
    count = max(map(len, wants), default=0)
    found, first, load = [], 0, [0] * len(wants)
    kept = [0] * len(wants)
    for unit in range(count + 1):
        sizes = [
            sum(_nbytes(sources, path, box) for path, box, keep in units[unit] if keep)
            if unit < len(units)
            else 0
            for units in wants
        ]
        full = any(have + more > budget for have, more in zip(kept, sizes, strict=True))
        if (unit == count or full) and unit > first:
            routed = [
                list(_parts(units[first:unit], first, rank, sources, load))
                for rank, units in enumerate(wants)
            ]
            found.append((first, unit, list(rounds(_interleaved(routed), budget))))
            first, kept = unit, [0] * len(wants)
        kept = [have + more for have, more in zip(kept, sizes, strict=True)]
    return found


def _nbytes(sources: Sources, path: Path, box: Box) -> int:
    return box.numel * ITEMSIZE[sources[path][0].dtype]


def _parts(
    units: Wants, first: int, rank: int, sources: Sources, load: list[int]
) -> Iterator[Transfer]:
    for unit, needs in enumerate(units, first):
        for number, (path, box, _) in enumerate(needs):
            for piece, source in routes(sources, path, box, rank, load):
                nbytes = _nbytes(sources, path, piece)
                load[source] += nbytes * (source != rank)
                yield Transfer(path, piece, source, rank, unit, number, nbytes)


def routes(
    sources: Sources, path: Path, box: Box, rank: int, load: Sequence[int]
) -> Iterator[tuple[Box, int]]:
    """Yield boxes that tile `box`, each with a rank that holds it: rank `rank` itself first, then the
    rank with the least to send. Raises RunError CKM513 where no rank holds a part."""
    near = [(source, own) for source, own in sources[path][1] if own.intersect(box)]
    near.sort(key=lambda found: (found[0] != rank, load[found[0]], found[0]))
    rest = [box] if box.numel else []
    for source, own in near:
        left: list[Box] = []
        for hole in rest:
            common = own.intersect(hole)
            if common is None:
                left.append(hole)
                continue
            yield common, source
            left += around(hole, common)
        rest = left
        if not rest:
            return
    if rest:
        raise RunError(
            "CKM513",
            f"{'.'.join(map(str, path))}: no rank holds {list(rest[0].offsets)}"
            f"+{list(rest[0].sizes)}, which rank {rank} needs",
            "every rank must pass its part of the state dict",
        )


def around(box: Box, hole: Box) -> list[Box]:
    """Return the boxes that tile `box` without `hole`."""
    found: list[Box] = []
    for dim, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        start, stop = hole.offsets[dim], hole.offsets[dim] + hole.sizes[dim]
        for begin, end in ((low, start), (stop, low + size)):
            if end > begin:
                offsets = (*hole.offsets[:dim], begin, *box.offsets[dim + 1 :])
                sizes = (*hole.sizes[:dim], end - begin, *box.sizes[dim + 1 :])
                found.append(Box(offsets, sizes))
    return found


def _interleaved(routed: Sequence[Sequence[Transfer]]) -> Iterator[Transfer]:
    """Yield the first transfer of each rank, then the second, so that all ranks are busy in every
    round."""
    for some in itertools.zip_longest(*routed):
        yield from (part for part in some if part is not None)


def rounds(parts: Iterator[Transfer], budget: int) -> Iterator[Round]:
    """Yield rounds of transfers in which no rank has more than `budget` bytes in messages."""
    limit = max(ALIGN, budget // 2 // ALIGN * ALIGN)
    current: list[Transfer] = []
    used: dict[int, int] = {}
    for part in itertools.chain.from_iterable(_cut(part, limit) for part in parts):
        ends = () if part.source == part.target else (part.source, part.target)
        if current and any(used.get(end, 0) + part.room > budget for end in ends):
            yield current
            current, used = [], {}
        for end in ends:
            used[end] = used.get(end, 0) + part.room
        current.append(part)
    if current:
        yield current


def _cut(part: Transfer, limit: int) -> Iterator[Transfer]:
    if part.source == part.target or part.nbytes <= limit:
        yield part
        return
    itemsize = part.nbytes // part.box.numel
    for box in row_major_boxes(part.box, limit // itemsize):
        yield part._replace(box=box, nbytes=box.numel * itemsize)
