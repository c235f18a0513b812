"""Workspace: the place of one conversion, from the check of its destination until it is published.

    workspace = Workspace(plan, dst, how, ranks)    checks dst and what the run needs
    workspace.is_published()                        an earlier run of the plan finished already
    with workspace:                                 out_dir and journal are there
        ...                                         write all files of the plan into out_dir
        workspace.prove(done)                       the source is unchanged, the output is as planned
        workspace.publish()                         dst appears by one rename

Every rank makes its own and calls the same methods in the same order. Rank 0 holds the work
directory with its lock, and alone proves and publishes; the others write into that directory.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ckptmap.core import requirements
from ckptmap.core.json_text import parse_json
from ckptmap.core.log import log
from ckptmap.errors import REFUSED_VALUES, CkptmapError, DestinationError
from ckptmap.execution import manifest as manifests
from ckptmap.execution.heartbeat import Stopped
from ckptmap.execution.phases import Phases
from ckptmap.execution.ranks import Ranks
from ckptmap.execution.written_slots import Executed
from ckptmap.operations.check_digests import sha256_of
from ckptmap.operations.overwrite import manifest_at, refuse_stranger
from ckptmap.operations.prove import is_complete, prove_output
from ckptmap.planning.options import RunOptions
from ckptmap.planning.plan import Plan
from ckptmap.protocols.progress import PROVING, SYNCING
from ckptmap.storage.destination import (
    check_destination,
    check_kind,
    check_overlap,
    named_place,
)
from ckptmap.storage.file_records import DamagedRecord
from ckptmap.storage.journal import Journal
from ckptmap.storage.publish import WorkDirectory
from ckptmap.storage.publish_by_marker import is_pending
from ckptmap.storage.recover import clear_published
from ckptmap.storage.source_changes import file_states, require_unchanged

FUTILE = REFUSED_VALUES | {"CKM105", "CKM115", "CKM403"}
"""Errors that every run of the same command meets again: of values that the output cannot hold, of a damaged source or
a damaged manifest of it, and of parts whose values contradict each other."""
TOUCHED = (
    "began anew: the files of the source were written, copied or linked since the run that was"
    " interrupted"
)


def place_for(plan: Plan, dst: str | os.PathLike[str]) -> Path:
    """Return the destination of a plan. Raise DestinationError where its name is none that the output
    can have, CKM304, or where it overlaps with the source, CKM302."""
    place = named_place(dst)
    check_kind(dst, plan.one_file, plan.aim.setup.writer)
    read = [plan.ckpt.path, *([plan.reference.ckpt.path] if plan.reference else ())]
    check_overlap([*read, *plan.fingerprints], place)
    return place


def check_place(plan: Plan, dst: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise DestinationError as a run of the plan would before its first byte. Nothing is written.

    Space and permissions are not looked at: another time they may be others.
    """
    place = place_for(plan, dst)
    held = manifest_at(place) if place.exists() else None
    if held is None or held.get("plan") != plan.digest:  # else it is complete, and a run says so
        check_destination(place, plan.one_file, overwrite)


def require_place(plan: Plan, dst: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise DestinationError as `check_place` does, but for a destination that ckptmap wrote: what it
    holds can be what a plan will be that is not complete yet."""
    place = place_for(plan, dst)
    if not place.exists() or manifest_at(place) is None:
        check_destination(place, plan.one_file, overwrite)


class Workspace:
    """The place of one conversion on one rank.

    Raises DestinationError where `dst` cannot be a destination, PlanError CKM210 or CKM211 where
    the device or a library does not work here.
    """

    out_dir: Path
    """The directory that the plan's files are written into; set inside the context."""
    journal: Journal
    """This rank's record of what is written; set inside the context."""

    def __init__(
        self, plan: Plan, dst: str | os.PathLike[str], how: RunOptions, ranks: Ranks
    ) -> None:
        self.plan, self.ranks = plan, ranks
        self.dst = place_for(plan, dst)
        self.how = _on_this_rank(how, plan, ranks)
        self.notes: list[str] = []
        """What the user should be told besides the notes of the plan."""
        self._work: WorkDirectory | None = None
        self._held = ExitStack()

    # ------------------------------------------------------------------ an earlier run

    def is_published(self) -> bool:
        """Return on every rank whether the destination holds the whole output of this plan.

        A run that was killed just after it published leaves that.
        """
        complete = self.ranks.rank == 0 and is_complete(self.plan, self.dst, self.how)
        return bool(self.ranks.of_lead(b"complete" if complete else b""))

    def begin(self, phase: str) -> None:
        """Tell progress and log that a phase begins."""
        Phases.of(self.how.progress).begin(phase)

    def clear(self) -> None:
        """Remove what the run left that published the destination."""
        self.notes.append("was complete already")
        log.info("%s: was complete already", self.dst)
        if self.ranks.rank == 0:
            self._note_sha256(self.dst)
            self.notes += clear_published(self.dst, self.plan.digest, self.how.sync)

    # ------------------------------------------------------------------ this run

    def __enter__(self) -> Self:
        """Lock the destination and open the journal; raises DestinationError."""
        with ExitStack() as held:
            if self.ranks.rank == 0:
                self._work = held.enter_context(self._open())
                held.push(self._discard_if_refused)
                self._work.refuse_strangers(self._files)
            self.out_dir, self.journal = self._share()
            held.enter_context(self.journal)
            held.push(self._void_if_damaged)
            self._held = held.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def _open(self) -> WorkDirectory:
        plan, overwrite = self.plan, self.how.overwrite
        if overwrite and not is_pending(self.dst):
            refuse_stranger(self.dst, self._files)
        return WorkDirectory.open(
            self.dst, plan.digest, one_file=plan.one_file, overwrite=overwrite,
            nbytes=plan.nbytes_out,
        )  # fmt: skip

    def _discard_if_refused(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove what was written where no run can continue it: the same command would meet the same
        damage or the same values again, and after coarse scales another plan takes its place.

        Of several ranks another may have been refused, and each may still write when one has: rank 0 waits
        for them. Where one does not stop in time, the work stays, and a run after damage begins anew.
        """
        if self._work is None or not isinstance(error, CkptmapError):
            return
        cause = self._cause(error)
        if getattr(cause, "code", "") in FUTILE:
            self._work.discard()
        elif isinstance(cause, DestinationError):
            self._work.drop_if_nothing_done()

    def _cause(self, error: CkptmapError) -> BaseException | None:
        """Return the error that ends the run where that can be a refusal; None where ranks may still write."""
        refused = error.code in FUTILE or isinstance(error, Stopped | DestinationError)
        return self.ranks.cause(error) if refused else None

    def _void_if_damaged(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the next run begin anew where bytes of the source were damaged.

        Units of any rank may have been written from them before that was known, and a good copy of
        the source, put in the place of the damaged one, would not mend what they wrote.
        """
        if isinstance(error, DamagedRecord):
            self.journal.void()

    def _share(self) -> tuple[Path, Journal]:
        """Return the output directory and this rank's journal; rank 0 opens its own first."""
        plan, work = self.plan, self._work
        if work is not None:
            source = file_states(plan.fingerprints, plan.ckpt.files.mounts)
            journal = Journal(work.journal_path, plan.digest, source=source)
            if journal.begins_anew:
                self.notes.append(TOUCHED)
            elif journal.entries:
                log.info(
                    "continues an earlier run: %d units are in its journal", len(journal.entries)
                )
            shared = [str(work.out_dir), str(work.journal_path), source]
            self.ranks.of_lead(json.dumps(shared).encode())
            return work.out_dir, journal
        *places, source = parse_json(self.ranks.of_lead(b""))
        out_dir, journal_path = map(Path, places)
        if not journal_path.is_file():
            raise DestinationError(
                "CKM304",
                f"{out_dir}: rank 0 has made this directory, but this machine does not see it",
                "choose a destination on a file system that all ranks share",
            )
        return out_dir, Journal(journal_path, plan.digest, self.ranks.rank, source)

    def prove(self, done: Executed) -> dict[str, float]:
        """Raise RunError where the source changed meanwhile, or the output is not as planned.

        CKM308 the source changed, CKM306 a write failed, CKM401 the output is not as planned,
        CKM309 quantizing made finite values NaN or infinite. Returns, on rank 0, the measured
        error of each quantized tensor by FQN. Waits for all ranks.
        """
        self.journal.close()
        self.begin(PROVING)
        hint = "nothing was published; convert again from a source at rest"
        require_unchanged(self.plan.fingerprints, self.plan.ckpt.files.mounts, hint)
        self.ranks.barrier()
        if self._work is None:
            return {}
        errors = prove_output(self.plan, done, self.out_dir, self.how.digest)
        self._note_sha256(self.out_dir / self.plan.files[0].out.name)
        return errors

    def publish(self) -> None:
        """Let the output appear at the destination. Waits for all ranks.

        Raises RunError CKM401 where files lie among those of the output that the plan does not name,
        DestinationError CKM301, RunError CKM306; the destination is then as it was.
        """
        if self._work is not None:
            self.ranks.check()
            self.begin(SYNCING)
            self._work.publish(self._files, self.how.sync)
            self.notes += self._work.notes
            log.info("published %s", self.dst)
        self.ranks.barrier()

    @property
    def _files(self) -> set[str]:
        """The names of all files of the output."""
        written = {file.out.name for file in self.plan.files}
        return written if self.plan.one_file else {*written, *self.plan.carried, manifests.NAME}

    def _note_sha256(self, written: Path) -> None:
        """Note the sha256 of a one-file output: its manifest lies inside and cannot state it."""
        if self.how.digest == "sha256" and self.plan.one_file:
            self.notes.append(f"sha256 of {self.dst}: {sha256_of(written)}")


def _on_this_rank(how: RunOptions, plan: Plan, ranks: Ranks) -> RunOptions:
    """Return the options with this rank's own device, tried if the plan computes, and a progress
    function. Raises PlanError CKM210 or CKM211."""
    device = how.device
    requirements.require_libraries("xxhash")
    if plan.encodes:
        requirements.require_libraries("torch")
        device = ranks.device(device)  # threads that are started later begin with device 0
        requirements.require_device(device, f"--device {device}")
    return replace(how, device=device, progress=Phases.on_rank(ranks.rank, how.progress))
