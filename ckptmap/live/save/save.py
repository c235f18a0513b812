"""save(): a live model, its optimizer and the state of the run, as one atomic checkpoint.

    model, optimizer -> boxes of this rank -> which rank writes which -> files -> one rename

Every rank writes its own boxes; only descriptions and digests are exchanged. The result is a DCP
directory with ckptmap's manifest, which torch's own `dcp.load` reads too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from ckptmap.core import argument_checks
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.signatures import spelled_out
from ckptmap.core.state_paths import ListIndex
from ckptmap.live.model import module_extra_state, rng_state
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.load_report import listed
from ckptmap.live.model.rank_group import UNTOUCHED, RankGroup, said_if_lost
from ckptmap.live.optimizer import flat_lowbit, gradients, run_settings, state_placement
from ckptmap.live.optimizer.local_state import (
    LocalShard,
    LocalState,
    LocalTensor,
    ParamOwner,
    hold_model,
    hold_optimizer,
    holds_tensor,
    info_of,
    owners,
)
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.live.options import SaveOptions
from ckptmap.live.save import extra_values, pending_gradients
from ckptmap.live.save.assign_writers import Assigner, Offer, drifted_buffers, offers_of
from ckptmap.live.save.overlapping_meshes import require_alike
from ckptmap.live.save.save_handle import SaveHandle, settle_started
from ckptmap.live.save.write_dcp import FileLayout, snapshot, write
from ckptmap.tensors import Box, Path

if TYPE_CHECKING:
    from typing import Unpack

    import torch

    from ckptmap.live.optimizer.optimizer_types import ParamGroup, Scheduler
    from ckptmap.live.options import SaveKeywords

WRITE_TIMEOUT_S = 1800.0
"""Seconds, at least, that ranks wait for each other while they write: disks may be slow."""


OWN_NAMES = frozenset(
    {
        run_settings.KEY, rng_state.KEY, flat_lowbit.KEY, module_extra_state.KEY, "scheduler",
        run_settings.PER_RANK, gradients.PENDING,
    }
)  # fmt: skip
"""Names among the extra values that ckptmap uses itself."""


@spelled_out(SaveOptions)
@tensors_on_cpu()
def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Scheduler | None = None,
    **keywords: Unpack[SaveKeywords],
) -> SaveHandle:
    """Save a model, its optimizer, its scheduler and every rank's random streams.

    Every rank calls it, whatever wraps the model: plain, DDP, compiled, FSDP1, FSDP2, HSDP, TP.
    Names are plain FQNs, and optimizer state is keyed by them. Low-bit state is stored as plain
    tensors with a record. `ckptmap.live.options.SaveOptions` describes the keywords.

    Buffers may differ between ranks, as statistics of BatchNorm do under FSDP: those of the lowest
    rank are saved, and a note of `wait()` says so. Under DDP rank 0's buffers are broadcast.

    A save in the background that failed, and whose error no `wait()` has raised, is raised by the next
    call, which then saves nothing.

    Raises, on all ranks: DestinationError before a byte is written, LoadError CKM505 or CKM508 for
    what cannot be saved, ArgumentError CKM516 for values that cannot, CKM518 where gradients are
    pending and `gradients` is None, RunError CKM509 where replicas differ, CKM510 where the ranks'
    parts do not make whole tensors, CKM307 where a rank died or did not come in time.
    """
    options = SaveOptions.of(keywords)
    unseen = settle_started()
    random_state = rng_state.captured(model)
    with said_if_lost(UNTOUCHED.format(path)):
        peers = RankGroup.join("save", options.timeout)
        writers = RankGroup.join("save files", max(options.timeout or 0, WRITE_TIMEOUT_S))
        with peers.together():
            if unseen is not None:
                raise unseen
            _check(path, model, scheduler)
            options.check()
            targets, _ = find_targets(model)
            held = _held(model, targets, optimizer, scheduler, peers, random_state, options)
            offered = offers_of(held.holdings)
            extra_digests = extra_values.digests(options.extra or {})
            evidence = pending_gradients.evidence(model, targets)
        _require_same_values(held, peers.all((options.step, extra_digests, evidence)), options)
        offers = peers.all(offered)
        drifted = _share(held, offers, model, peers, options.replicas)
        target = FilePath(path)
        with peers.together(), argument_checks.hints_for_python():
            if options.replicas == "first":
                offers = [[replace(one, checked=False) for one in some] for some in offers]
            assignment = Assigner(peers.rank, peers.world, held).assign(offers)
            state = assignment.state(_ordered(held.values), peers.world)
            layout = FileLayout.of(state, target.name)
            copies = snapshot(assignment.mine, copied=options.background)

    def publish() -> tuple[str, ...]:
        with argument_checks.hints_for_python():
            return (*write(layout, copies, target, options.overwrite, writers), *_lost(drifted))

    return SaveHandle(target, options.step, publish, options.background)


def _check(path: str | os.PathLike[str], model: torch.nn.Module, scheduler: object) -> None:
    """Raise ArgumentError CKM516 for an argument that means nothing."""
    argument_checks.path("path", path)
    argument_checks.module("model", model)
    argument_checks.scheduler(scheduler, "state_dict")


def _require_same_values(
    held: LocalState,
    told: Sequence[tuple[int | None, Mapping[str, str], pending_gradients.Evidence]],
    options: SaveOptions,
) -> None:
    """Compare what all ranks told: step, digests of extra values, and evidence of pending gradients.

    Raises ArgumentError CKM516 where they differ, CKM518 where gradients are pending."""
    extra_values.require_same_step([step for step, _, _ in told])
    extra_values.require_same([digests for _, digests, _ in told])
    pending = pending_gradients.told([one for _, _, one in told])
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
        (held.settings["layout"], bool(held.decoded), replicas, held.placements)
    )
    if any(wanted == "check" for _, _, wanted, _ in settings_of):
        require_alike(held, offers, peers)
    with peers.together():
        drifted = [] if _broadcasts_buffers(model) else drifted_buffers(offers)
        described = {
            **held.settings,
            "layout": [layout for layout, *_ in settings_of],
            "decoded": any(decoded for _, decoded, _, _ in settings_of),
            run_settings.PLACEMENTS: {k: v for *_, some in settings_of for k, v in some.items()},
            "buffers": drifted,
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


def _ordered(values: Mapping[Path, object]) -> dict[Path, object]:
    return {path: values[path] for path in sorted(values, key=lambda path: tuple(map(str, path)))}


def _held(
    model: torch.nn.Module,
    targets: Sequence[LiveTensor],
    optimizer: object,
    scheduler: Scheduler | None,
    peers: RankGroup,
    random_state: Mapping[str, object],
    options: SaveOptions,
) -> LocalState:
    held = LocalState()
    extra = extra_values.shared(options.step, options.extra, OWN_NAMES)
    per_rank = argument_checks.extra(options.extra_per_rank, (), "extra_per_rank")
    optimizer = None if optimizer is None else unwrapped(optimizer)
    mine = [] if optimizer is None else owners(optimizer, targets)
    held.settings = run_settings.describe(model, optimizer, targets, peers.world)
    hold_model(held, targets)
    if options.gradients:
        pending_gradients.hold(held, model, targets, peers.rank, peers.world)
    if optimizer is not None:
        hold_optimizer(held, mine)
        held.placements = state_placement.described(mine)
        for fqn, kept in flat_lowbit.exact_entries(mine).items():
            _values(held, (*_rank_path(flat_lowbit.KEY, peers), fqn), kept, private=True)
        if peers.rank == 0:
            _values(held, ("optimizer", "param_groups"), _groups(mine))
    _values(held, _rank_path(rng_state.KEY, peers), random_state, private=True)
    _values(held, _rank_path(run_settings.PER_RANK, peers), per_rank, private=True)
    states = {k: m.get_extra_state() for k, m in module_extra_state.getters(model).items()}
    if peers.rank == 0:
        for key, value in states.items():
            _values(held, ("extra", module_extra_state.KEY, key), value)
        if scheduler is not None:
            _values(held, ("extra", "scheduler"), scheduler.state_dict())
        for key, value in extra.items():
            _values(held, ("extra", key), value)
    return held


def _rank_path(name: str, peers: RankGroup) -> Path:
    """Return where the values of this rank are saved."""
    return ("extra", name, f"rank{peers.rank}")


def _groups(mine: Sequence[ParamOwner]) -> list[ParamGroup]:
    """Return the parameter groups: hyper-parameters, and `params` by FQN."""
    groups: dict[int, ParamGroup] = {}
    for owner in mine:
        group = owner.part.group
        known = groups.setdefault(
            id(group),
            {
                **{k: v for k, v in group.items() if k not in ("params", "param_names")},
                "params": [],
            },
        )
        known["params"] += [target.fqn for target, _ in owner.members]
    return list(groups.values())


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
        held.values[path] = plain(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _values(held, (*path, key), item, private)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _values(held, (*path, ListIndex(number)), item, private)


def plain(value: object) -> object:
    """Return a nested value with Python's own types in place of subclasses: Counter -> dict,
    TorchVersion -> str.

    Anything else stays as it is, and the writer refuses it by name.
    """
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    kinds: tuple[Any, ...] = (bool, int, float, str, bytes)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)
