"""CheckpointManager: the checkpoints of one run, saved, found, restored and removed.

    root/step-100/      a checkpoint of `ckptmap.save`; its extra values have the metrics
    root/step-200/
    root/latest         the name of the newest, as text: `step-200`

Nothing else is kept: what there is, is read from the directories, so that a copy of some of them, or
another framework's, is restored as well.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmap.core import argument_checks
from ckptmap.core.log import log
from ckptmap.errors import ArgumentError, CkptmapError, DestinationError
from ckptmap.live.load.load import load
from ckptmap.live.manager import root_directory
from ckptmap.live.manager.described_steps import DescribedSteps
from ckptmap.live.manager.metrics import numbers, record
from ckptmap.live.manager.numbered_state import named_by_live
from ckptmap.live.manager.preemption import Preemption
from ckptmap.live.manager.retention import Mode, Retention
from ckptmap.live.model.load_report import LoadReport
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.options import SaveOptions, ValueKeywords
from ckptmap.live.save.prepare import prepare
from ckptmap.live.save.reserve import SaveMemory
from ckptmap.live.save.save import save_all
from ckptmap.live.save.save_handle import SaveHandle
from ckptmap.live.save.this_rank import Managed
from ckptmap.operations.newest_step import LATEST, around_newest, newest_first
from ckptmap.operations.overwrite import refuse_stranger
from ckptmap.operations.step_directories import (
    LAST_STEP,
    MANAGER,
    SavedStep,
    StepDirectory,
    describe_step,
    find_steps,
)
from ckptmap.storage.own_files import MANIFEST

if TYPE_CHECKING:
    from typing import Unpack

    from ckptmap.live.model.several_models import Models
    from ckptmap.live.options import Optimizers, Schedulers


TERMINATED = 143
"""Exit code of a process that SIGTERM ended: 128 + 15."""
_UNUSABLE = ("CKM1", "CKM4", "CKM308", "CKM310")
"""Codes of errors that say that a checkpoint is incomplete or damaged, not that the call is wrong."""


class CheckpointManager:
    """The checkpoints of one run below a directory. Every rank makes one and calls the same methods.

    every       `save` does nothing at steps that this number does not divide
    keep        number of the newest checkpoints to keep; None: all of them
    keep_every  keep also each step that this number divides
    keep_best   keep also the best by a metric: ("loss", "min")
    background  write in a thread while training goes on
    bandwidth   bytes a second, as `"200MiB"`, that each rank writes in the background at most
    timeout     seconds that a rank waits for the others, as in `ckptmap.save`

    Checkpoints are removed after a newer one is published, and only those that a manager saved.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, Mode] | None = None,
        background: bool = True,
        bandwidth: int | str | None = None,
        timeout: float | None = None,
    ) -> None:
        argument_checks.written_path("root", root)
        if bandwidth is not None:
            bandwidth = argument_checks.nbytes("bandwidth", bandwidth)
        argument_checks.timeout(timeout)
        self.root = Path(root).absolute()  # a run may change its working directory
        self.every = argument_checks.integer("every", every, 1)
        self.retention = Retention(keep, keep_every, keep_best)
        self.retention.check()
        prepare()
        self.background = background
        self.bandwidth = bandwidth
        self.timeout = timeout
        self._preemption = Preemption()
        self._exit_code = TERMINATED
        self._last: SaveHandle | None = None
        self._cleaner: threading.Thread | None = None
        self._blocked_s: dict[int, float] = {}
        self._strange: set[Path] = set()
        self._memory = SaveMemory()
        self._described = DescribedSteps()
        self._warned = self._goes_back = self._has_reserved = False

    @property
    def blocked_s(self) -> dict[int, float]:
        """Seconds for which `save` held the calling thread on this rank, by step."""
        return dict(self._blocked_s)

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        model: Models,
        optimizer: Optimizers | None = None,
        scheduler: Schedulers | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        **keywords: Unpack[ValueKeywords],
    ) -> SaveHandle | None:
        """Save a step where it is due, and return the handle of the save; None where it is not due.

        Call it after every step. After a signal of `on_preemption` it saves whatever is due, waits until
        the checkpoint is published, and ends the process by SystemExit.

        metrics   numbers of this step, by which `keep_best` and `best` choose; the same on all ranks
        force     save although the step is not due
        keywords  those of `ckptmap.save`, but for what the manager decides itself
        """
        begun = time.perf_counter()
        step = argument_checks.integer("step", step, 0, LAST_STEP)
        argument_checks.known_keywords(keywords, [*ValueKeywords.__annotations__], "save()")
        ends = self._preemption.agreed(self._ranks)
        if not (force or ends or step % self.every == 0):
            self._reserve(model, optimizer, keywords.get("only"))
            return None
        if ends:
            self._log_unseen()
        self._has_reserved = True
        self._memory.hold()
        target = self.root / f"step-{step}"
        self._warn_of_metrics(metrics or {})
        values = numbers(metrics)
        managed = Managed(repr(sorted(values.items())), lambda: self._begin(target, step, values))
        keywords.setdefault("timeout", self.timeout)
        options = SaveOptions.of({
            **keywords, "step": step, "overwrite": False, "bandwidth": self.bandwidth,
            "background": self.background and not ends,
        })  # fmt: skip
        handle = save_all(target, model, optimizer, scheduler, options, managed)
        self._follow(handle)
        self._blocked_s[step] = time.perf_counter() - begun
        if ends:
            self.wait()
            log.warning("saved %s and ends, as a signal asked", target)
            raise SystemExit(self._exit_code)
        return handle

    def _reserve(self, model: Models, optimizer: Optimizers | None, only: object = None) -> None:
        """Make memory for the first save once the optimizer has state, so that training does not wait for it."""
        if self.background and only is None and not self._has_reserved:
            self._has_reserved = True
            self._memory.reserve(optimizer, model)

    def _warn_of_metrics(self, metrics: Mapping[str, float]) -> None:
        """Say where none of the metrics is the one of `keep_best`: a name may be misspelt."""
        name = self.retention.keep_best[0] if self.retention.keep_best else ""
        if name and metrics and name not in metrics and not self._warned:
            log.warning("%s: keep_best is by %r, metrics has %s", self.root, name, [*metrics])
            self._warned = True

    def _log_unseen(self) -> None:
        """Log the error of the save before. The last save must not be lost for it."""
        try:
            self.wait()
        except Exception as error:
            log.error("%s: the save before failed: %s", self.root, error)

    def on_preemption(self, *signals: str, exit_code: int = TERMINATED) -> None:
        """After one of these signals, `"SIGTERM"` by default, let the next `save` be the last.

        All ranks agree at every call of `save` whether any of them was sent a signal. Call it in the
        main thread."""
        self._exit_code = argument_checks.integer("exit_code", exit_code, 0, 255)
        self._preemption.watch(signals or ("SIGTERM",))

    def wait(self) -> None:
        """Wait until the last save is published and old checkpoints are removed. Raises its error."""
        last, self._last = self._last, None  # its error is raised once
        if last is not None and not (last.done and last.is_told):
            last.wait()
        if self._cleaner is not None:
            self._cleaner.join()

    def close(self) -> None:
        """Wait for the last save, do at signals what the process did before, and give pinned memory back."""
        self._preemption.release()
        try:
            self.wait()
        finally:
            self._memory.give_back()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(
        self, target: Path, step: int, metrics: Mapping[str, float]
    ) -> tuple[bool, dict[str, object]]:
        """Return whether a step is saved a second time, by a run that went back, and the record of this save with
        its number: they rise in the order of saves. Rank 0 calls it once the save before has ended."""
        found = find_steps(self.root)
        is_ours = any(one.path == target and self._is_ours(one) for one in found)
        near = around_newest(self.root, found, self._described.of)
        self._warn_of_later([one.step for one in near if not one.problem], step)
        return is_ours, record(1 + max((one.number for one in near), default=0), metrics)

    def _warn_of_later(self, steps: Sequence[int], step: int) -> None:
        """Say where a run goes back by itself, which `restore` has not told it to."""
        if steps and max(steps) > step and not self._goes_back:
            log.warning(
                "%s: step %d is saved after step %d and is the newest from now on: `restore` takes it",
                self.root, step, max(steps),
            )  # fmt: skip
            self._goes_back = True

    def _is_ours(self, found: StepDirectory) -> bool:
        """Return whether a manager saved a checkpoint, which may be replaced then. One that cannot be opened
        any more, and that `restore` passes over, is moved aside: else no run would get beyond its step."""
        described = describe_step(found)
        if described.problem and (aside := root_directory.move_aside(found.path)):
            log.warning("%s: moved to %s: %s", found.path, aside.name, described.problem)
        return described.is_managed

    def _follow(self, handle: SaveHandle) -> None:
        """Once the save is published, name it the newest and remove what no rule keeps, on rank 0."""
        if self._cleaner is not None:
            self._cleaner.join()
        self._last = handle
        if self._ranks().rank == 0:
            self._cleaner = threading.Thread(
                target=self._clean_after, args=(handle,), name="ckptmap-retention"
            )
            self._cleaner.start()

    def _clean_after(self, handle: SaveHandle) -> None:
        if handle.settle() is not None:
            return
        try:
            root_directory.point_to(self.root, handle.path.name)
        except OSError as error:
            log.error("%s: %s could not be written: %s", self.root, LATEST, error)
        try:
            root_directory.sweep(self.root)
            saved = [one for one in self._saved() if one.is_managed]
            for old in self.retention.removable(sorted(saved, key=lambda one: one.number)):
                if old.path != handle.path and not self._is_strange(old.path):
                    root_directory.remove(old.path)
        except OSError as error:
            log.error("%s: old checkpoints could not be removed: %s", self.root, error)

    def _is_strange(self, path: Path) -> bool:
        """Return whether a checkpoint has files of others, so that it is not removed; say so once."""
        try:
            refuse_stranger(path)
        except DestinationError as error:
            if path not in self._strange:
                log.warning("%s: is not removed: %s", path, error.message)
            self._strange.add(path)
            return True
        return False

    # ------------------------------------------------------------------ finding

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that can be opened, rising."""
        return [one.step for one in self._saved()]

    def latest(self) -> Path | None:
        """Return the newest checkpoint that can be opened; None where there is none.

        The newest is the one that was saved last. A run that went back to step 10 and saved step 15 has
        that one as its newest, though a step 30 of before is there. Where no manager has saved, as in the
        directories of torchtitan, accelerate and Trainer, it is that of the highest step, as there."""
        opened = (describe_step(one) for one in newest_first(self.root))
        return next((one.path for one in opened if not one.problem), None)

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric of `keep_best`; None where none has it."""
        found = self.retention.best(self._saved())
        return None if found is None else found.path

    def _saved(self) -> list[SavedStep]:
        return [one for one in self._described.anew(find_steps(self.root)) if not one.problem]

    # ------------------------------------------------------------------ restoring

    def restore(
        self,
        model: Models,
        optimizer: Optimizers | None = None,
        scheduler: Schedulers | None = None,
        *,
        step: int | str = "latest",
        **keywords: Any,
    ) -> LoadReport | None:
        """Load a checkpoint of the run, and return the report; None where there is none yet.

        step      "latest", "best", or a number
        keywords  those of `ckptmap.load`

        With "latest", a checkpoint that is incomplete or damaged is passed over for the one before:
        the report's `skipped` says which and why. Where none is left the last error is raised. A
        checkpoint that does not fit the model is an error at once.
        """
        if self._last is not None:
            self._last.settle()  # this manager's own save in the background may be the newest
        ranks = self._ranks()
        wanted: list[StepDirectory] = []
        skipped: list[str] = []
        with ranks.together():
            if ranks.rank == 0:
                wanted = self._wanted(step)
        wanted = ranks.all(wanted)[0]
        for number, found in enumerate(wanted, 1):
            try:
                with (
                    ranks.together(),
                    named_by_live(
                        found.path, model, optimizer, bool(keywords.get("strict", True))
                    ) as place,
                ):
                    report = load(place, model, optimizer, scheduler, **keywords)
            except CkptmapError as error:
                if not error.code.startswith(_UNUSABLE) or number == len(wanted):
                    raise
                skipped.append(f"{found.path.name}: {error.message}")
                log.warning("%s: passed over: %s", found.path, error.message)
                continue
            extra = {key: value for key, value in report.extra.items() if key != MANAGER}
            at = found.step if report.step is None else report.step
            self._goes_back |= step not in ("latest", "best")
            for text in report.inexact:
                if MANIFEST in text:
                    log.warning("%s: %s", found.path, text)
            self._reserve(model, optimizer)
            return replace(report, step=at, extra=extra, skipped=tuple(skipped))
        return None

    def _wanted(self, step: int | str) -> list[StepDirectory]:
        """Return the checkpoints to try in turn. Raises SourceError CKM101 where a named one is absent."""
        found = newest_first(self.root)
        if not found:
            root_directory.refuse_no_root(self.root)
        if step == "latest":
            return found
        if step == "best":
            best = self.best()
            found = [one for one in found if one.path == best]
            missing = root_directory.of_best(self.retention.keep_best)
        elif isinstance(step, str):
            hint = f"step={int(step)}" if step.isdecimal() else "see help()"
            raise ArgumentError(
                "CKM516", f"step={step!r}, expected 'latest', 'best' or a number", hint
            )
        else:
            at = argument_checks.integer("step", step, 0)
            found = [one for one in found if one.step == at][:1]
            missing = f"a checkpoint of step {at}"
        if not found:
            raise root_directory.no_such_step(self.root, missing, self.steps())
        return found

    def _ranks(self) -> RankGroup:
        return RankGroup.join("manager", self.timeout)
