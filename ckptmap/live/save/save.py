"""save(): a live model, its optimizer and the state of the run, as one atomic checkpoint.

    model, optimizer -> boxes of this rank -> which rank writes which -> files -> one rename

Every rank writes its own boxes; only descriptions and digests are exchanged. The result is a DCP
directory with ckptmap's manifest, which torch's own `dcp.load` reads too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ckptmap.core import argument_checks
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.signatures import spelled_out
from ckptmap.live.model import module_walk, several_models
from ckptmap.live.model.rank_group import UNTOUCHED, RankGroup, said_if_lost
from ckptmap.live.optimizer.several_optimizers import check_scheduler, one_scheduler
from ckptmap.live.options import SaveOptions
from ckptmap.live.save import only_trained
from ckptmap.live.save.exchange import Told, lost_buffers, require_same_values, told_by_all
from ckptmap.live.save.save_handle import SaveHandle, settle_started
from ckptmap.live.save.this_rank import Managed, Mine
from ckptmap.live.save.write_dcp import write

if TYPE_CHECKING:
    from typing import Unpack

    from ckptmap.live.model.several_models import Models
    from ckptmap.live.options import Optimizers, SaveKeywords, Schedulers

WRITE_TIMEOUT_S = 1800.0
"""Seconds, at least, that ranks wait for each other while they write: disks may be slow."""


@spelled_out(SaveOptions)
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
    Stages of a pipeline, of which each rank has others, are saved with each rank's own optimizer and scheduler. A rank
    with several gives lists: `save(path, [part0, part2], [o0, o2])`; parts keep the FQNs of the whole model.

    Buffers may differ between ranks, as statistics of BatchNorm do under FSDP: those of the lowest
    rank are saved, and a note of `wait()` says so. Under DDP rank 0's buffers are broadcast.

    The error of a save in the background that no `wait()` has raised is raised by the next call. Ranks need their process
    group until then: call `wait()` before `dist.destroy_process_group()`.

    Raises, on all ranks: DestinationError before a byte is written, LoadError CKM505 or CKM508 and
    ArgumentError CKM516 for what cannot be saved, CKM518 where gradients are pending and `gradients`
    is None, RunError CKM509 where replicas differ, CKM510 where the ranks' parts do not make whole
    tensors, CKM307 where a rank died or did not come in time.
    """
    return save_all(path, model, optimizer, scheduler, SaveOptions.of(keywords))


@tensors_on_cpu()
def save_all(
    path: str | os.PathLike[str], model: Models, optimizer: Optimizers | None,
    scheduler: Schedulers | None, options: SaveOptions, managed: Managed | None = None,
) -> SaveHandle:  # fmt: skip
    """Save as `save` does; `managed` where a manager calls it."""
    begun, unseen, one = time.perf_counter(), settle_started(), several_models.as_one(model)
    with said_if_lost(UNTOUCHED.format(path)), module_walk.listed_once(), paused_gc():
        peers = RankGroup.join("save", options.timeout)
        writers = RankGroup.join("save files", max(options.timeout or 0, WRITE_TIMEOUT_S))
        mine = Mine(path, one, optimizer, one_scheduler(scheduler), options, peers, managed)

        def first() -> Told:
            _check(path, model, optimizer, scheduler, options, unseen)
            return mine.told()

        told = told_by_all(peers, first)
        if any(each.only for each in told):
            part = only_trained.part_of_all(
                path, mine.targets, one, optimizer, options, peers,
                [each.only for each in told], [each.unmatched for each in told],
            )  # fmt: skip
            told = told_by_all(peers, lambda: mine.collected(part))
        require_same_values(mine.held, told, bool(options.gradients))
        ready = mine.planned(told)
    target, overwrite = FilePath(path), mine.options.overwrite
    if options.background:  # the working directory may change meanwhile
        target = target.absolute()

    def publish() -> tuple[str, ...]:
        with argument_checks.hints_of_saves():
            with said_if_lost(UNTOUCHED.format(path)):
                layout = ready.layout(writers)
            notes = write(layout, ready.copies, target, overwrite, writers, options.pace)
        return (*notes, *mine.held.notes, *lost_buffers(ready.drifted))

    return SaveHandle(target, options.step, publish, options.background, begun)


def _check(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: object,
    scheduler: object,
    options: SaveOptions,
    unseen: BaseException | None,
) -> None:
    """Raise ArgumentError CKM516 for an argument that means nothing, and before it the error of an
    earlier save that nobody has seen."""
    if unseen is not None:
        raise unseen
    options.check()
    argument_checks.written_path("path", path)
    several_models.check("model", model)
    argument_checks.optimizer(optimizer)
    check_scheduler(scheduler, "state_dict")
