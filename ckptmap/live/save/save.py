"""save(): a live model, its optimizer and the state of the run, as one atomic checkpoint.

    model, optimizer -> boxes of this rank -> which rank writes which -> files -> one rename

Every rank writes its own boxes; only descriptions and digests are exchanged. The result is a DCP
directory with ckptmap's manifest, which torch's own `dcp.load` reads too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.core import argument_checks
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.signatures import spelled_out
from ckptmap.core.state_paths import ListIndex
from ckptmap.live.model import (
    integer_keys,
    loaded_bases,
    module_extra_state,
    rng_state,
    several_models,
    stateful,
    tuples,
)
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.load_report import listed
from ckptmap.live.model.plain_values import simplified
from ckptmap.live.model.rank_group import UNTOUCHED, RankGroup, said_if_lost
from ckptmap.live.model.tuples import holds_tensor
from ckptmap.live.optimizer import (
    beside_params,
    flat_lowbit,
    gradients,
    lbfgs,
    run_settings,
    state_placement,
)
from ckptmap.live.optimizer.local_state import (
    STATE,
    LocalShard,
    LocalState,
    LocalTensor,
    hold_model,
    hold_optimizer,
    info_of,
    owners,
)
from ckptmap.live.optimizer.several_optimizers import (
    check_scheduler,
    one_scheduler,
    scheduler_classes,
)
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.live.options import SaveOptions
from ckptmap.live.rounding import record as rounding
from ckptmap.live.save import extra_values, group_values, only_trained, pending_gradients
from ckptmap.live.save.assign_writers import Assigner, Offer, drifted_buffers, offers_of
from ckptmap.live.save.only_trained import SavedPart, changed_on_any
from ckptmap.live.save.overlapping_meshes import require_alike
from ckptmap.live.save.save_handle import SaveHandle, settle_started
from ckptmap.live.save.write_dcp import FileLayout, snapshot, write
from ckptmap.tensors import Box, Path

if TYPE_CHECKING:
    from typing import Unpack

    import torch

    from ckptmap.live.model.several_models import Models
    from ckptmap.live.options import Optimizers, SaveKeywords, Schedulers

WRITE_TIMEOUT_S = 1800.0
"""Seconds, at least, that ranks wait for each other while they write: disks may be slow."""


OWN_NAMES = frozenset(
    {
        run_settings.KEY, rng_state.KEY, flat_lowbit.KEY, module_extra_state.KEY, "scheduler",
        run_settings.PER_RANK, gradients.PENDING, stateful.KEY,
        lbfgs.KEY, tuples.KEY, integer_keys.KEY, beside_params.KEY,
    }
)  # fmt: skip
"""Names among the extra values that ckptmap uses itself."""


@spelled_out(SaveOptions)
@tensors_on_cpu()
def save(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers | None = None,
    scheduler: Schedulers | None = None,
    **keywords: Unpack[SaveKeywords],
) -> SaveHandle:
    """Save a model, its optimizer, its scheduler and every rank's random streams.

    Every rank calls it, whatever wraps the model: plain, DDP, compiled, FSDP1, FSDP2, HSDP, TP.
    Names are plain FQNs, and optimizer state is keyed by them. Low-bit state is stored as plain
    tensors with a record. `ckptmap.live.options.SaveOptions` describes the keywords.
    Several models are a dict by name, which their FQNs begin with, and so are several optimizers:
    `save(path, {"policy": m, "value": v}, {"policy": o1, "value": o2})`.

    Buffers may differ between ranks, as statistics of BatchNorm do under FSDP: those of the lowest
    rank are saved, and a note of `wait()` says so. Under DDP rank 0's buffers are broadcast.

    The error of a save in the background that no `wait()` has raised is raised by the next call.

    Raises, on all ranks: DestinationError before a byte is written, LoadError CKM505 or CKM508 and
    ArgumentError CKM516 for what cannot be saved, CKM518 where gradients are pending and `gradients`
    is None, RunError CKM509 where replicas differ, CKM510 where the ranks' parts do not make whole
    tensors, CKM307 where a rank died or did not come in time.
    """
    begun, options, unseen = time.perf_counter(), SaveOptions.of(keywords), settle_started()
    given, one = model, several_models.as_one(model)
    random_state = rng_state.captured(one)
    with said_if_lost(UNTOUCHED.format(path)):
        peers = RankGroup.join("save", options.timeout)
        writers = RankGroup.join("save files", max(options.timeout or 0, WRITE_TIMEOUT_S))
        with peers.together():
            _check(path, given, scheduler, options, unseen)
            states, (targets, _) = stateful.states_of(options.stateful), find_targets(one)
            part = SavedPart.of(path, targets, one, optimizer, options.patterns, options.base)
        part = changed_on_any(part, options.patterns, peers)
        with peers.together():
            held = _held(one, targets, part, optimizer, scheduler, peers, random_state, options)
            only_trained.refuse_to_replace(held.settings.get(base_record.KEY), path)
            mine = Told.of(options, states, pending_gradients.evidence(one, targets), held)
        told = peers.all(mine)
        with peers.together():
            _require_same_values(held, told, options)
            _hold_states(held, states, stateful.shared_names([t.states for t in told]), peers)
            offered = offers_of(held.holdings)
        offers = peers.all(offered)
        target, drifted = FilePath(path), _share(held, offers, one, peers, options.replicas)
        with peers.together(), argument_checks.hints_for_python():
            offers = offers if options.replicas == "check" else _unchecked(offers)
            assignment = Assigner(peers.rank, peers.world, held).assign(offers)
            state = assignment.state(_ordered(held.values), peers.world)
            layout = FileLayout.of(state, target.name)
            copies = snapshot(assignment.mine, copied=options.background)

    def publish() -> tuple[str, ...]:
        with argument_checks.hints_for_python():
            notes = write(layout, copies, target, options.overwrite, writers, options.pace)
        return (*notes, *held.notes, *_lost(drifted))

    return SaveHandle(target, options.step, publish, options.background, begun)


def _unchecked(offers: list[list[Offer]]) -> list[list[Offer]]:
    return [[replace(one, checked=False) for one in some] for some in offers]


def _check(
    path: str | os.PathLike[str],
    model: Models,
    scheduler: object,
    options: SaveOptions,
    unseen: BaseException | None,
) -> None:
    """Raise ArgumentError CKM516 for an argument that means nothing, and before it the error of an
    earlier save that nobody has seen."""
    if unseen is not None:
        raise unseen
    options.check()
    argument_checks.path("path", path)
    several_models.check("model", model)
    check_scheduler(scheduler, "state_dict")


@dataclass(frozen=True)
class Told:
    """What a rank tells the others of its values, before anything is written.

    extra, states  digests of the caller's values by name
    evidence       of gradients that are pending
    bases          of a save of a part of the weights; rank 0 has taken the digests
    """

    step: int | None
    extra: Mapping[str, str]
    states: Mapping[str, str]
    evidence: pending_gradients.Evidence
    bases: object

    @classmethod
    def of(
        cls,
        options: SaveOptions,
        states: Mapping[str, object],
        evidence: pending_gradients.Evidence,
        held: LocalState,
    ) -> Told:
        extra = extra_values.digests(options.extra or {})
        bases = held.settings.get(base_record.KEY)
        return cls(options.step, extra, extra_values.digests(states), evidence, bases)


def _require_same_values(held: LocalState, told: Sequence[Told], options: SaveOptions) -> None:
    """Compare what all ranks told.

    Raises ArgumentError CKM516 where they differ, CKM518 where gradients are pending."""
    extra_values.require_same_step([one.step for one in told])
    extra_values.require_same([one.extra for one in told])
    if told[0].bases:
        held.settings[base_record.KEY] = told[0].bases
    pending = pending_gradients.told([one.evidence for one in told])
    if options.gradients is None:
        pending_gradients.refuse(pending)
    if pending and not options.gradients:
        held.settings[run_settings.WITHOUT] = pending


def _share(
    held: LocalState,
    offers: Sequence[Sequence[Offer]],
    model: torch.nn.Module,
    peers: RankGroup,
    replicas: str,
) -> list[str]:
    """Exchange plain values, records and settings, so that every rank has those of all, and return
    the names of the buffers that differ between ranks. Raises RunError CKM509 where replicas do."""
    everything = peers.all((held.values, held.records))
    settings_of = peers.all(
        (held.settings["layout"], bool(held.decoded), replicas, held.placements, held.simplified)
    )
    rounding.require_one_seed(peers.all(rounding.seeds(held.settings)))
    if any(wanted == "check" for _, _, wanted, *_ in settings_of):
        require_alike(held, offers, peers)
    with peers.together():
        drifted = [] if _broadcasts_buffers(model) else drifted_buffers(offers)
        described = {
            **held.settings,
            "layout": [layout for layout, *_ in settings_of],
            "decoded": any(decoded for _, decoded, *_ in settings_of),
            run_settings.PLACEMENTS: {k: v for *_, some, _ in settings_of for k, v in some.items()},
            run_settings.FORMS: list(
                dict.fromkeys(name for *_, some in settings_of for name in some)
            ),
            "buffers": drifted,
            run_settings.UNLIKE: _unlike([values for values, _ in everything]),
        }
        _values(held, ("extra", run_settings.KEY), described)
        for values, records in reversed(everything):
            held.records.update(records)
            held.values |= values
    return drifted


def _broadcasts_buffers(model: torch.nn.Module) -> bool:
    """Return whether DDP broadcasts rank 0's buffers before each forward, so that those of other ranks
    need not be saved."""
    return any(getattr(module, "broadcast_buffers", False) for module in model.modules())


def _lost(buffers: Sequence[str]) -> tuple[str, ...]:
    if not buffers:
        return ()
    what = "buffer differs" if len(buffers) == 1 else "buffers differ"
    return (
        f"{len(buffers)} {what} between ranks, those of the lowest were saved: {listed(buffers)}",
    )


def _unlike(values_of: Sequence[Mapping[Path, object]]) -> list[str]:
    """Return the names of the plain values of optimizer state that differ between ranks."""
    first: dict[Path, object] = {}
    differing = {
        ".".join(map(str, path[2:])): None
        for values in values_of
        for path, value in values.items()
        if path[: len(STATE)] == STATE and repr(first.setdefault(path, value)) != repr(value)
    }
    return [*differing]


def _ordered(values: Mapping[Path, object]) -> dict[Path, object]:
    return {path: values[path] for path in sorted(values, key=lambda path: tuple(map(str, path)))}


def _held(
    model: torch.nn.Module,
    targets: Sequence[LiveTensor],
    part: SavedPart,
    optimizer: object,
    scheduler: Schedulers | None,
    peers: RankGroup,
    random_state: Mapping[str, object],
    options: SaveOptions,
) -> LocalState:
    held = LocalState()
    run_scheduler = one_scheduler(scheduler)
    extra = extra_values.shared(options.step, options.extra, OWN_NAMES)
    per_rank = argument_checks.extra(options.extra_per_rank, (), "extra_per_rank")
    left_out = beside_params.unsaved(optimizer, (options.stateful or {}).values())
    optimizer = None if optimizer is None else unwrapped(optimizer)
    mine = [] if optimizer is None else owners(optimizer, targets)
    held.settings = run_settings.describe(model, optimizer, targets, peers.world)
    if options.only is not None:
        _hold_part(held, part, model, peers)
        targets = part.kept
    hold_model(held, targets)
    if options.gradients:
        pending_gradients.hold(held, model, targets, peers.rank, peers.world)
    if optimizer is not None:
        hold_optimizer(held, mine)
        held.placements = state_placement.described(mine)
        for fqn, kept in flat_lowbit.exact_entries(mine).items():
            _values(held, (*_rank_path(flat_lowbit.KEY, peers), fqn), kept, private=True)
        if left_out:
            held.settings[run_settings.UNSAVED] = left_out
        if keys := beside_params.held(optimizer):
            _values(held, _rank_path(beside_params.KEY, peers), keys, private=True)
        vectors = lbfgs.held(mine)
        if peers.rank == 0:
            _values(held, ("optimizer", "param_groups"), group_values.groups(mine, optimizer))
            held.notes += group_values.notes(mine)
            held.notes += [
                f"optimizer: {text}, which is not saved; save it as stateful={{NAME: optimizer}}"
                for text in left_out
            ]
            for fqn, of_all in vectors.items():
                _values(held, ("extra", lbfgs.KEY, fqn), of_all)
    _values(held, _rank_path(rng_state.KEY, peers), random_state, private=True)
    _values(held, _rank_path(run_settings.PER_RANK, peers), per_rank, private=True)
    states = {k: m.get_extra_state() for k, m in module_extra_state.getters(model).items()}
    if peers.rank == 0:
        for key, value in states.items():
            _values(held, ("extra", module_extra_state.KEY, key), value)
        if run_scheduler is not None:
            held.settings[run_settings.SCHEDULER] = scheduler_classes(run_scheduler)
            _values(held, ("extra", "scheduler"), run_scheduler.state_dict())
        for key, value in extra.items():
            _values(held, ("extra", key), value)
        if places := tuples.of(extra):
            held.values["extra", tuples.KEY] = places
    return held


def _hold_part(held: LocalState, part: SavedPart, model: torch.nn.Module, peers: RankGroup) -> None:
    """Record the bases of the weights that are left out, and say which are saved beside those that
    `only` names."""
    held.notes += part.notes()
    if part.left:
        held.settings[base_record.KEY] = part.records(model, digests=peers.rank == 0)
    loaded_bases.saved_in_part(part.kept)


def _hold_states(
    held: LocalState, states: Mapping[str, object], shared: Collection[str], peers: RankGroup
) -> None:
    """Add the states of the caller's objects: those that are the same on all ranks, and the rest."""
    for name, state in states.items():
        if name not in shared:
            _values(held, (*_rank_path(stateful.KEY, peers), name), state, private=True)
        elif peers.rank == 0:
            _values(held, ("extra", stateful.KEY, stateful.SHARED, name), state)


def _rank_path(name: str, peers: RankGroup) -> Path:
    """Return where the values of this rank are saved."""
    return ("extra", name, f"rank{peers.rank}")


def _values(held: LocalState, path: Path, value: object, private: bool = False) -> None:
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
            _values(held, (*path, key), item, private)
        listed: dict[str, object] = {integer_keys.KEY: integer_keys.of(value)}
        if path[0] == "extra":  # a live group of parameters shows itself what of it is a tuple
            listed[tuples.KEY] = tuples.of(value)
        for key, marks in listed.items():
            if marks:
                held.values[(*path, key)] = marks
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _values(held, (*path, ListIndex(number)), item, private)
