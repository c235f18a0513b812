"""save(): a live model, its optimizer and the state of the run, as one atomic checkpoint.

    model, optimizer -> boxes of this rank -> which rank writes which -> files -> one rename

Every rank writes its own boxes; only descriptions and digests are exchanged. The result is a DCP
directory with ckptmap's manifest, which torch's own `dcp.load` reads too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.core import argument_checks
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.signatures import spelled_out
from ckptmap.live.model import rng_state, several_models, stateful
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.rank_group import UNTOUCHED, RankGroup, said_if_lost
from ckptmap.live.optimizer.several_optimizers import check_scheduler
from ckptmap.live.options import SaveOptions
from ckptmap.live.save import only_trained, pending_gradients
from ckptmap.live.save.assign_writers import Assigner, Offer, offers_of
from ckptmap.live.save.collect import collect, collect_states
from ckptmap.live.save.exchange import Told, lost_buffers, require_same_values, share
from ckptmap.live.save.save_handle import SaveHandle, settle_started
from ckptmap.live.save.write_dcp import FileLayout, snapshot, write
from ckptmap.tensors import Path

if TYPE_CHECKING:
    from typing import Unpack

    from ckptmap.live.model.several_models import Models
    from ckptmap.live.options import Optimizers, SaveKeywords, Schedulers

WRITE_TIMEOUT_S = 1800.0
"""Seconds, at least, that ranks wait for each other while they write: disks may be slow."""


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
        part = only_trained.part_of_all(path, targets, one, optimizer, options, peers)
        with peers.together():
            held = collect(one, targets, part, optimizer, scheduler, peers, random_state, options)
            only_trained.refuse_to_replace(held.settings.get(base_record.KEY), path)
            mine = Told.of(options, states, pending_gradients.evidence(one, targets), held)
        told = peers.all(mine)
        with peers.together():
            require_same_values(held, told, options)
            collect_states(held, states, stateful.shared_names([t.states for t in told]), peers)
            offered = offers_of(held.holdings)
        offers = peers.all(offered)
        target, drifted = FilePath(path), share(held, offers, one, peers, options.replicas)
        with peers.together(), argument_checks.hints_for_python():
            offers = offers if options.replicas == "check" else _unchecked(offers)
            assignment = Assigner(peers.rank, peers.world, held).assign(offers)
            state = assignment.state(_ordered(held.values), peers.world)
            layout = FileLayout.of(state, target.name)
            copies = snapshot(assignment.mine, copied=options.background)

    def publish() -> tuple[str, ...]:
        with argument_checks.hints_for_python():
            notes = write(layout, copies, target, options.overwrite, writers, options.pace)
        return (*notes, *held.notes, *lost_buffers(drifted))

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


def _ordered(values: Mapping[Path, object]) -> dict[Path, object]:
    return {path: values[path] for path in sorted(values, key=lambda path: tuple(map(str, path)))}
