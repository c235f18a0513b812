"""Moves boxes of live tensors from the ranks that hold them to the ranks that need them.

    needs of all ranks -> transfers (box, source, target) -> rounds within the byte budget
    -> in each round one message between a pair of ranks, device to device

Every rank computes the same rounds, which a digest proves. Nothing is gathered: a rank receives the
boxes that it needs, and copies those that it holds itself.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptmap.errors import RunError
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.model.tensor_reader import TensorReader, window
from ckptmap.live.state_dict.live_checkpoint import LiveStateDict, Sources
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.tensors import ITEMSIZE, Box, Path

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

ALIGN = 16
"""Alignment in bytes of a box in a message, so that it can be viewed in its own dtype."""


@dataclass(eq=False)
class Need:
    """A box that this rank needs: in `out` (any dtype and device), or, where that is None, kept on
    `device` while the step of its task runs."""

    path: Path
    box: Box
    out: torch.Tensor | None
    device: torch.device


@dataclass(eq=False)
class ReshardTask:
    """The boxes that one tensor of the model needs, and the step that runs once they are here."""

    needs: list[Need] = field(default_factory=list)
    step: Callable[[TensorReader], None] | None = None


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


Outs = Mapping[tuple[int, int], tuple[Need, "torch.Tensor"]]
"""(task number, need number) -> the need, and the tensor that receives it."""


# ------------------------------------------------------------------------------- the plan


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


# ------------------------------------------------------------------------------- the moves


@dataclass(frozen=True)
class Transport:
    """The process group and the device of messages."""

    group: ProcessGroup | None
    device: torch.device

    @classmethod
    def agreed(cls, peers: RankGroup, device: torch.device) -> Transport:
        """Return a transport on `device` where every rank has a backend that sends from it, else on
        the host."""
        import torch
        import torch.distributed as dist

        if peers.world == 1:
            return cls(None, torch.device("cpu"))
        config = dict(one.split(":", 1) for one in dist.get_backend_config().split(","))
        able = config.get(device.type, "") not in ("", "gloo", "undefined")
        kinds = set(peers.all(device.type if able else "cpu"))
        if kinds == {device.type} and device.type != "cpu":
            return cls(None, device)
        return cls(peers.group, torch.device("cpu"))


class Exchange:
    """Exchanges the boxes that tasks need, batch by batch, and runs their steps. Every rank makes and
    runs one, with tasks of the same tensors in the same order."""

    def __init__(self, live: LiveStateDict, budget: int, device: torch.device) -> None:
        self._memory, self._sources, self._peers = live.memory, live.sources, live.peers
        self._budget = max(4 * ALIGN, budget)
        self._transport = Transport.agreed(live.peers, device)

    def run(self, units: Sequence[ReshardTask], reader: TensorReader) -> None:
        """Run all tasks. Raises RunError on all ranks: CKM513 where the ranks' plans differ or no rank
        holds a box, and the error of a step on any of them."""
        for first, end, moves in self._planned(units):
            with self._peers.together():
                self._bring(units, first, min(end, len(units)), moves)
                for unit in units[first:end]:
                    if unit.step is not None:
                        unit.step(reader)
                self._memory.clear()

    @contextmanager
    def kept(self, units: Sequence[ReshardTask]) -> Iterator[None]:
        """Keep the boxes that these tasks need on this rank while the context lasts."""
        for first, end, moves in self._planned(units):
            with self._peers.together():
                self._bring(units, first, min(end, len(units)), moves)
        try:
            yield
        finally:
            self._memory.clear()

    def _planned(self, units: Sequence[ReshardTask]) -> list[tuple[int, int, list[Round]]]:
        """Return the batches, which are the same on every rank."""
        for unit in units:
            unit.needs = [need for need in unit.needs if not self._is_here(need)]
        mine = [[(n.path, n.box, n.out is None) for n in unit.needs] for unit in units]
        wants = self._peers.all(mine)
        with self._peers.together():
            plan = batches(wants, self._sources, self._budget)
        self._agree(plan)
        return plan

    def _bring(
        self, units: Sequence[ReshardTask], first: int, end: int, moves: Sequence[Round]
    ) -> None:
        outs = self._outs(units, first, end)
        for one in moves:
            self._move(one, outs)
        for need, out in outs.values():
            if need.out is None:
                self._memory.add_received(need.path, need.box, out)

    def _is_here(self, need: Need) -> bool:
        """Return whether the step can read the box from this rank's memory."""
        return need.out is None and (not need.box.numel or self._memory.has(need.path, need.box))

    def _agree(self, plan: object) -> None:
        digest = hashlib.blake2b(repr(plan).encode(), digest_size=16).hexdigest()
        for rank, other in enumerate(self._peers.all(digest)):
            if other != digest:
                raise RunError(
                    "CKM513",
                    f"rank {rank} has plan {other}, rank {self._peers.rank} has {digest}",
                    "run the same release of ckptmap on every rank",
                )

    def _outs(self, units: Sequence[ReshardTask], first: int, end: int) -> Outs:
        """Return the tensor that receives each need; a box that is kept for a step gets a new one."""
        import torch

        found = {}
        for number in range(first, end):
            for index, need in enumerate(units[number].needs):
                out = need.out
                if out is None:
                    dtype: torch.dtype = getattr(torch, self._sources[need.path][0].dtype)
                    out = torch.empty(need.box.sizes, dtype=dtype, device=need.device)
                found[number, index] = (need, out)
        return found

    def _move(self, parts: Round, outs: Outs) -> None:
        """Run one round: one message between a pair of ranks; boxes of this rank are copied meanwhile."""
        rank = self._peers.rank
        sent: dict[int, list[Transfer]] = {}
        received: dict[int, list[Transfer]] = {}
        for part in parts:
            if part.source == rank != part.target:
                sent.setdefault(part.target, []).append(part)
            elif part.target == rank != part.source:
                received.setdefault(part.source, []).append(part)
        outbound = {peer: self._message(some) for peer, some in sent.items()}
        inbound = {peer: self._message(some) for peer, some in received.items()}
        for peer, message in outbound.items():
            for part, values in self._values(sent[peer], message):
                self._memory.copy(part.path, part.box, values)
        works = self._started(outbound, inbound)
        for part in parts:
            if part.source == part.target == rank:
                self._memory.copy(part.path, part.box, _view(part, outs))
        for work in works:
            work.wait()
        for peer, message in inbound.items():
            for part, values in self._values(received[peer], message):
                _view(part, outs).copy_(values)

    def _started(
        self, outbound: Mapping[int, torch.Tensor], inbound: Mapping[int, torch.Tensor]
    ) -> Sequence[Work]:
        import torch.distributed as dist

        group = self._transport.group
        operations = []
        for peer in sorted({*outbound, *inbound}):
            if peer in outbound:
                operations.append(dist.P2POp(dist.isend, outbound[peer], peer, group))
            if peer in inbound:
                operations.append(dist.P2POp(dist.irecv, inbound[peer], peer, group))
        return dist.batch_isend_irecv(operations) if operations else ()

    def _message(self, parts: Sequence[Transfer]) -> torch.Tensor:
        import torch

        nbytes = sum(part.room for part in parts)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._transport.device)

    def _values(
        self, parts: Sequence[Transfer], message: torch.Tensor
    ) -> Iterator[tuple[Transfer, torch.Tensor]]:
        """Yield each transfer with the view of the message that holds it, in its dtype and shape."""
        import torch

        at = 0
        for part in parts:
            dtype: torch.dtype = getattr(torch, self._sources[part.path][0].dtype)
            yield part, message[at : at + part.nbytes].view(dtype).view(part.box.sizes)
            at += part.room


def _view(part: Transfer, outs: Outs) -> torch.Tensor:
    need, out = outs[part.unit, part.need]
    return window(out, part.box.relative_to(need.box.offsets))
