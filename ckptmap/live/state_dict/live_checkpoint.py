"""A state dict in memory as a Checkpoint: every rank learns who holds which box, and no value moves.

{"layers.0.weight": DTensor, ...} of each rank  ->  boxes of this rank  ->  stored tensors that all
ranks know, each box with the ranks that hold it  ->  Checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint.assemble import assemble
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.split_roles import Roles
from ckptmap.core.state_paths import ListIndex
from ckptmap.errors import LoadError
from ckptmap.live.model.live_form import is_loadable, quantized_classes
from ckptmap.live.model.live_tensor import LiveTensor, is_dtensor, local_boxes
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.model.tuples import holds_tensor
from ckptmap.live.optimizer.family import codes_of
from ckptmap.live.optimizer.local_state import (
    LocalShard,
    LocalState,
    LocalTensor,
    hold_tensor,
    local_codes,
)
from ckptmap.live.save.assign_writers import Assigner, Assignment, Offer, offers_of
from ckptmap.live.state_dict import sharded_tensor as sharded
from ckptmap.live.state_dict.memory_blocks import ROOT, LiveStored, Memory
from ckptmap.protocols import Index, in_saved_order
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, Path, TensorInfo

if TYPE_CHECKING:
    import torch

MODEL: Path = ("model",)
OPTIMIZER: Path = ("optimizer",)
WHERE = "state dict"
Sources = Mapping[Path, tuple[TensorInfo, Sequence[tuple[int, Box]]]]
"""Stored path -> shape and dtype, and (rank, box) for every box that a rank holds."""


@dataclass(frozen=True, eq=False)
class StateDictTensor(LiveTensor):
    """A tensor of a state dict, which no module holds."""

    value: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        assert self.value is not None, "a tensor that is read must be given"
        return self.value


@dataclass(frozen=True, eq=False)
class LiveStateDict:
    """A state dict of all ranks; `memory` has the boxes of this rank."""

    checkpoint: Checkpoint
    memory: Memory
    sources: Sources
    peers: RankGroup


def open_state_dict(
    state: Mapping[str, object],
    peers: RankGroup,
    role: str,
    weights: Mapping[str, TensorInfo] | None = None,
) -> LiveStateDict:
    """Return the state dicts of all ranks as one checkpoint. Every rank of `peers` calls it with what
    it has: shards, everything, or nothing.

    role     what the state dict is: "model" or "optimizer"
    weights  shapes and dtypes of the model that the optimizer state belongs to

    Raises, on all ranks: LoadError CKM505 for tensors that cannot be read, RunError CKM510 where
    the ranks' parts do not make whole tensors.
    """
    mine = LocalState()
    with peers.together():
        for path, value in _leaves(state, (role,)):
            _hold(mine, path, value)
    offers = peers.all(offers_of([replace(one, checked=False) for one in mine.holdings]))
    told = peers.all((mine.values, mine.records, _ties(mine.holdings)))
    with peers.together():
        ties: dict[Path, object] = {}
        for values, records, shared in reversed(told):
            mine.values |= values
            mine.records.update(records)
            ties |= shared
        assignment = Assigner(peers.rank, peers.world, mine).assign(offers)
        memory = _memory(mine, assignment)
        index = _index(assignment, mine, memory, ties, peers.world)
        files = Files()
        files.mounts.mount(ROOT, memory)
        checkpoint = assemble(WHERE, index, _roles(index, role), files, weights)
    return LiveStateDict(checkpoint, memory, _sources(offers, assignment), peers)


def assign_state_dict(state: Mapping[Path, object], peers: RankGroup) -> Assignment:
    """Return tensors by path as stored tensors, each box with the one rank that writes it: of replicas,
    the lowest. Raises as `open_state_dict` does."""
    mine = LocalState()
    with peers.together():
        for path, value in state.items():
            _hold(mine, path, value)
    offers = peers.all(offers_of([replace(one, checked=False) for one in mine.holdings]))
    for records in peers.all(mine.records):
        mine.records.update(records)
    with peers.together():
        return Assigner(peers.rank, peers.world, mine).assign(offers)


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    if isinstance(value, Mapping) and value and all(isinstance(key, str | int) for key in value):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and any(map(holds_tensor, value)):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, ListIndex(number)))
    else:
        yield path, value


# ------------------------------------------------------------------------------- what is held


def _hold(mine: LocalState, path: Path, value: object) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        mine.values[path] = value
        return
    if sharded.is_sharded(value):
        mine.holdings.append(sharded.holding(path, value))
        return
    leaf = StateDictTensor((str(path[-1]),), (), False, None, value.detach())
    codes = codes_of(leaf.tensor)
    _refuse(path, leaf, codes is not None)
    if codes is not None:
        info = TensorInfo(tuple(value.shape), "float32")
        ((box, _),) = local_boxes(leaf)
        piece = local_codes(box, codes, info.shape)
        mine.holdings.append(LocalTensor(path, info, [piece], _primary(leaf)))
    else:
        hold_tensor(mine, leaf, path)


def _primary(leaf: StateDictTensor) -> bool | None:
    return leaf.is_primary if leaf.is_cut else None


def _refuse(path: Path, leaf: StateDictTensor, coded: bool) -> None:
    name, kind = ".".join(map(str, path)), type(leaf.local).__name__
    if str(leaf.local.layout) != "torch.strided":
        kind = f"tensor of layout {leaf.local.layout}"
    if leaf.local.is_meta and leaf.local.numel():
        raise LoadError("CKM505", f"{WHERE}: {name} is on meta and has no values", "load it first")
    if coded and len(local_boxes(leaf)) != 1:
        raise LoadError(
            "CKM508", f"{WHERE}: {name} is quantized and has {len(local_boxes(leaf))} boxes on one rank",
            "use a mesh whose placements are Shard, each of another dim",
        )  # fmt: skip
    if not coded and not is_loadable(kind):
        raise LoadError(
            "CKM505",
            f"{WHERE}: {name} is a {kind}, expected a dense tensor, a DTensor, or one of"
            f" {', '.join(quantized_classes())}",
            "decode it, or save it and convert the checkpoint",
        )


def _ties(holdings: Sequence[LocalTensor]) -> dict[Path, object]:
    """Return path -> the first path whose values are the same bytes of memory."""
    first: dict[object, Path] = {}
    found: dict[Path, object] = {}
    for holding in holdings:
        pieces = [piece for piece in holding.pieces if isinstance(piece, LocalShard)]
        keys = [
            (v.data_ptr(), tuple(v.shape), v.stride(), v.dtype, str(v.device))
            for v in (piece.values for piece in pieces)
            if v.numel()
        ]
        if keys:
            found[holding.path] = first.setdefault(tuple(keys), holding.path)
    return found


# ------------------------------------------------------------------------------- what all hold


def _memory(mine: LocalState, assignment: Assignment) -> Memory:
    memory = Memory()
    for holding in mine.holdings:
        for piece in holding.pieces:
            if isinstance(piece, LocalShard):
                memory.add_own(holding.path, piece.box, piece.values)
    known = {holding.path for holding in mine.holdings}
    for (path, box), values in assignment.mine.items():
        if path not in known:  # a part of a quantized moment
            memory.add_own(path, box, values.view(box.sizes))
    return memory


def _index(
    assignment: Assignment,
    mine: LocalState,
    memory: Memory,
    ties: Mapping[Path, object],
    world: int,
) -> Index:
    leaves: dict[Path, Any] = {
        one.path: LiveStored(one.info, one.path, memory, ties.get(one.path))
        for one in assignment.tensors
    }
    leaves |= mine.values
    return Index("live", leaves, (), assignment.records, world, keeps_order=in_saved_order)


def _roles(index: Index, role: str) -> Roles:
    """Return the roles of the paths, which the caller states instead of having them guessed."""
    below = {path[1:]: leaf for path, leaf in index.leaves.items() if len(path) > 1}
    if role == "model":
        tensors = {path: leaf for path, leaf in below.items() if isinstance(leaf, LiveStored)}
        return Roles(MODEL, tensors, None, {}, {})
    return Roles(MODEL, {}, OPTIMIZER, below, {})


def _sources(offers: Sequence[Sequence[Offer]], assignment: Assignment) -> Sources:
    """Return every box of every rank, replicas too: the reader takes the nearest."""
    held_by: dict[Path, dict[tuple[int, Box], None]] = {}
    for rank, some in enumerate(offers):
        for one in some:
            held_by.setdefault(one.path, {}).update(dict.fromkeys((rank, b) for b in one.boxes))
    found = {}
    for tensor in assignment.tensors:
        boxes = held_by.get(tensor.path) or dict.fromkeys(tensor.chunks)
        found[tensor.path] = (tensor.info, tuple(boxes))
    return found


def any_sharded(tensors: Sequence[object]) -> bool:
    """Return whether any tensor is cut over ranks: a DTensor or a ShardedTensor."""
    return any(is_dtensor(tensor) or sharded.is_sharded(tensor) for tensor in tensors)
