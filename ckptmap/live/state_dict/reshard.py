"""Moves boxes of live tensors from the ranks that hold them to the ranks that need them.

    needs of all ranks -> transfers (box, source, target) -> rounds within the byte budget
    -> in each round one message between a pair of ranks, device to device

Every rank computes the same rounds, which a digest proves. Nothing is gathered: a rank receives the
boxes that it needs, and copies those that it holds itself.

A rank that fails must not leave others waiting for its messages, and NCCL does not tell them. So each
round has two parts: what may fail, above all allocating, comes first, and the ranks agree over gloo that
it succeeded. Only then messages are posted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptmap.errors import RunError
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.model.tensor_reader import TensorReader, window
from ckptmap.live.model.value_range import copy_held
from ckptmap.live.state_dict.live_checkpoint import LiveStateDict
from ckptmap.live.state_dict.memory_blocks import shown
from ckptmap.live.state_dict.reshard_rounds import ALIGN, Round, Transfer, batches
from ckptmap.tensors import Box, Path

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work


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


Outs = Mapping[tuple[int, int], tuple[Need, "torch.Tensor"]]
"""(task number, need number) -> the need, and the tensor that receives it."""


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

    def meet(self, peers: RankGroup) -> None:
        """Run one collective of all ranks, which some backends need before messages of a few ranks.

        The first call of a group may set up its communicator. Where that is a `batch_isend_irecv`, torch
        requires all ranks of the group to take part; a round need not have a message of each.
        """
        import torch
        import torch.distributed as dist

        if self.device.type == "cpu":
            return  # gloo connects all pairs when the group is made
        with peers.together():
            one = torch.ones(1, device=self.device)
        with peers.together():
            dist.all_reduce(one, group=self.group)


@dataclass(frozen=True)
class Messages:
    """One rank's messages of a round by peer, and the transfers of those that it receives."""

    outbound: Mapping[int, torch.Tensor]
    inbound: Mapping[int, torch.Tensor]
    received: Mapping[int, Sequence[Transfer]]


class Exchange:
    """Exchanges the boxes that tasks need, batch by batch, and runs their steps. Every rank makes and
    runs one, with tasks of the same tensors in the same order."""

    def __init__(self, live: LiveStateDict, budget: int, device: torch.device) -> None:
        self._memory, self._sources, self._peers = live.memory, live.sources, live.peers
        self._budget = max(4 * ALIGN, budget)
        self._transport = Transport.agreed(live.peers, device)
        self._has_met = False

    def run(self, units: Sequence[ReshardTask], reader: TensorReader) -> None:
        """Run all tasks. Raises RunError on all ranks: CKM513 where the ranks' plans differ or no rank
        holds a box, and the error of a step on any of them."""
        for first, end, moves in self._planned(units):
            self._bring(units, first, min(end, len(units)), moves)
            with self._peers.together():
                for unit in units[first:end]:
                    if unit.step is not None:
                        reader.run(unit.step)
                self._memory.clear()

    @contextmanager
    def kept(self, units: Sequence[ReshardTask]) -> Iterator[None]:
        """Keep the boxes that these tasks need on this rank while the context lasts."""
        for first, end, moves in self._planned(units):
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
        """Exchange the boxes that a batch needs. Raises on all ranks what one of them raised."""
        with self._peers.together():
            outs = self._outs(units, first, end)
        before: tuple[Round, Messages] | None = None
        for one in moves:
            if not self._has_met and any(part.source != part.target for part in one):
                self._transport.meet(self._peers)
                self._has_met = True
            with self._peers.together():  # one agreement of both: the messages before, and the next
                if before is not None:
                    self._exchange(*before, outs)
                    before = None  # their memory is that of the next
                before = (one, self._messages(one))
        with self._peers.together():
            if before is not None:
                self._exchange(*before, outs)
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

    def _messages(self, parts: Round) -> Messages:
        """Return this rank's messages of a round: those to send are filled."""
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
        return Messages(outbound, inbound, received)

    def _exchange(self, parts: Round, messages: Messages, outs: Outs) -> None:
        """Run one round: one message between a pair of ranks; boxes of this rank are copied meanwhile."""
        works = self._started(messages.outbound, messages.inbound)
        try:
            for part in parts:
                if part.source == part.target == self._peers.rank:
                    self._memory.copy(part.path, part.box, _view(part, outs))
        finally:  # other ranks wait for these messages
            for work in works:
                work.wait()
        for peer, message in messages.inbound.items():
            for part, values in self._values(messages.received[peer], message):
                copy_held(_view(part, outs), values, shown(part.path))

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
