"""What this rank holds of a run that is saved: boxes of the model and the optimizer's state, random streams,
the scheduler, and the caller's values.

model, optimizer, scheduler, extra values  ->  LocalState: tensors and plain values by their stored names
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.core import argument_checks
from ckptmap.core.state_paths import PER_RANK, ListIndex
from ckptmap.live.model import (
    integer_keys,
    loaded_bases,
    module_extra_state,
    rng_state,
    stateful,
    tuples,
    unsaved_buffers,
)
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.plain_values import simplified
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.model.tuples import holds_tensor
from ckptmap.live.optimizer import (
    beside_params,
    flat_lowbit,
    gradients,
    lbfgs,
    own_values,
    run_settings,
    state_placement,
)
from ckptmap.live.optimizer.local_state import (
    LocalShard,
    LocalState,
    LocalTensor,
    ParamOwner,
    hold_model,
    hold_optimizer,
    info_of,
    owners,
)
from ckptmap.live.optimizer.several_optimizers import scheduler_classes
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.live.options import SaveOptions
from ckptmap.live.save import extra_values, group_values, pending_gradients
from ckptmap.live.save.only_trained import SavedPart
from ckptmap.tensors import Box, Path

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import Scheduler

OWN_NAMES = frozenset(
    {
        run_settings.KEY, rng_state.KEY, flat_lowbit.KEY, module_extra_state.KEY, "scheduler",
        module_extra_state.OF_RANKS, run_settings.SCHEDULERS,
        PER_RANK, gradients.PENDING, stateful.KEY,
        lbfgs.KEY, tuples.KEY, integer_keys.KEY, beside_params.KEY, own_values.KEY,
    }
)  # fmt: skip
"""Names among the extra values that ckptmap uses itself."""


def collect(
    model: torch.nn.Module,
    targets: Sequence[LiveTensor],
    part: SavedPart,
    optimizer: object,
    scheduler: Scheduler | None,
    peers: RankGroup,
    random_state: Mapping[str, object],
    state_of: Mapping[str, object],
    options: SaveOptions,
) -> LocalState:
    """Return everything that this rank holds.

    targets       the model's tensors; of a save of a part of the weights, `part` has those that are saved
    random_state  the random streams, as they were when `save` was called
    state_of      the states of the caller's objects and of the scheduler by name

    Raises as `save` does for what cannot be saved."""
    held = LocalState()
    extra = extra_values.shared(options.step, options.extra, OWN_NAMES)
    per_rank = argument_checks.extra(options.extra_per_rank, (), "extra_per_rank")
    left_out = beside_params.unsaved(optimizer, (options.stateful or {}).values())
    optimizer = None if optimizer is None else unwrapped(optimizer)
    mine = [] if optimizer is None else owners(optimizer, targets)
    held.settings = run_settings.describe(model, optimizer, targets, peers.world)
    if unsaved := unsaved_buffers.begun_description(model):  # known when all ranks are told
        held.settings[unsaved_buffers.KEY] = unsaved
    if options.only is not None:
        _hold_part(held, part, model)
        targets = part.kept
    hold_model(held, targets)
    if options.gradients:
        pending_gradients.hold(held, model, targets, peers.rank, peers.world)
    if optimizer is not None:
        _hold_optimizer(held, optimizer, mine, left_out, peers)
    put(held, _rank_path(rng_state.KEY, peers), random_state, private=True)
    put(held, _rank_path(PER_RANK, peers), per_rank, private=True)
    if scheduler is not None:
        held.settings[run_settings.SCHEDULER] = scheduler_classes(scheduler)
    if peers.rank == 0:
        if scheduler is not None:
            put(held, ("extra", "scheduler"), state_of[run_settings.SCHEDULERS])
        for key, value in extra.items():
            put(held, ("extra", key), value)
        if places := tuples.of(extra):
            held.values["extra", tuples.KEY] = places
    return held


def _hold_optimizer(
    held: LocalState,
    optimizer: object,
    mine: Sequence[ParamOwner],
    left_out: list[str],
    peers: RankGroup,
) -> None:
    """Add the state of an `unwrapped` optimizer and its groups. `left_out` says what of it is not saved."""
    hold_optimizer(held, mine)
    held.placements = state_placement.described(mine)
    for fqn, kept in flat_lowbit.exact_entries(mine).items():
        put(held, (*_rank_path(flat_lowbit.KEY, peers), fqn), kept, private=True)
    if left_out:
        held.settings[run_settings.UNSAVED] = left_out
    if keys := beside_params.held(optimizer):
        put(held, _rank_path(beside_params.KEY, peers), keys, private=True)
    vectors = lbfgs.held(mine)
    held.groups = group_values.groups(mine, optimizer)
    if peers.rank == 0:
        held.notes += group_values.notes(mine)
        held.notes += [
            f"optimizer: {text}, which is not saved; save it as stateful={{NAME: optimizer}}"
            for text in left_out
        ]
        for fqn, of_all in vectors.items():
            put(held, ("extra", lbfgs.KEY, fqn), of_all)


def _hold_part(held: LocalState, part: SavedPart, model: torch.nn.Module) -> None:
    """Record the bases of the weights that are left out, and say which are saved beside those that
    `only` names."""
    held.notes += part.notes()
    if part.left:
        held.settings[base_record.KEY] = part.records(model)
    loaded_bases.saved_in_part(part.kept)


def collect_states(
    held: LocalState, states: Mapping[str, object], shared: Collection[str], peers: RankGroup
) -> None:
    """Add the states of the caller's objects: those that are the same on all ranks, and the rest. The scheduler of
    rank 0 is there before."""
    for name, state in states.items():
        if name == run_settings.SCHEDULERS:
            if name not in shared:
                put(held, _rank_path(name, peers), state, private=True)
        elif name not in shared:
            put(held, (*_rank_path(stateful.KEY, peers), name), state, private=True)
        elif peers.rank == 0:
            put(held, ("extra", stateful.KEY, stateful.SHARED, name), state)


def _rank_path(name: str, peers: RankGroup) -> Path:
    """Return where the values of this rank are saved."""
    return ("extra", name, f"rank{peers.rank}")


def put(held: LocalState, path: Path, value: object, private: bool = False) -> None:
    """Add a nested value to what this rank holds: tensors as tensors, the rest as plain values."""
    import torch

    if isinstance(value, torch.Tensor):
        extra_values.require_plain(path, value)
        whole = value.detach()
        piece = LocalShard(Box.whole(tuple(whole.shape)), whole)
        info = info_of(whole.shape, whole)
        held.holdings.append(LocalTensor(path, info, [piece], True if private else None))
    elif not holds_tensor(value):
        held.values[path] = simplified(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            put(held, (*path, key), item, private)
        listed: dict[str, object] = {integer_keys.KEY: integer_keys.of(value)}
        if path[0] == "extra":  # a live group of parameters shows itself what of it is a tuple
            listed[tuples.KEY] = tuples.of(value)
        for key, marks in listed.items():
            if marks:
                held.values[(*path, key)] = marks
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            put(held, (*path, ListIndex(number)), item, private)
