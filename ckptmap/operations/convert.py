"""convert(): plan, write beside the destination, prove, publish by one rename.

Several ranks make the same plan and each writes its share; rank 0 alone opens the work directory,
seals, proves and publishes, after every rank has reported and found its source unchanged.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.compare_tensors import sampled_error
from ckptmap.checkpoint.open import open
from ckptmap.core import argument_checks, requirements
from ckptmap.core.formatting import counted, human
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.quantized_codes import CoarseScales
from ckptmap.errors import CkptmapError, DestinationError, RunError
from ckptmap.execution import manifest as manifests
from ckptmap.execution.execute import execute
from ckptmap.execution.ranks import ALONE, Ranks
from ckptmap.execution.written_slots import Executed
from ckptmap.operations.check_structure import check_structure
from ckptmap.operations.overwrite import manifest_at, refuse_stranger
from ckptmap.operations.verify import NO_DIGESTS, sha256_of, verify
from ckptmap.planning.options import ConvertKeywords, Progress, RunOptions, separated
from ckptmap.planning.plan import Plan
from ckptmap.planning.planner import plan as make_plan
from ckptmap.planning.report import SAMPLE_NUMEL, Report
from ckptmap.planning.saved_plan import with_exact_scales
from ckptmap.storage.destination import check_overlap, named_place
from ckptmap.storage.journal import Journal
from ckptmap.storage.limits import short_of
from ckptmap.storage.publish import Workspace, clear_published, sync_tree
from ckptmap.storage.unchanged import require_at_rest


def convert(
    src: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    to: str,
    *,
    ranks: Ranks = ALONE,
    **keywords: Unpack[ConvertKeywords],
) -> Report:
    """Plan a conversion and run it. Keyword arguments are the fields of `Options`, what is written,
    and of `RunOptions`, how it is run: both in `ckptmap.planning.options`.

    ranks  the processes that work together, each of which makes this call:
           `with ckptmap.ranks.join() as ranks`

    Raises SourceError, PlanError or DestinationError before a byte is written, RunError after that;
    the same call then continues. The destination is complete or untouched.
    """
    options, how = separated(to, keywords, "convert()")
    plan = make_plan(src, to, options=options)
    return run(plan, dst, how, ranks)


def run(
    plan: Plan, dst: str | os.PathLike[str], how: RunOptions | None = None, ranks: Ranks = ALONE
) -> Report:
    """Execute a plan into `dst`; every rank calls it with the same plan and gets a report.

    Tensors whose block scales are too coarse for their outliers get exact scales, where their
    scheme has a form for that, and the report says so; among several ranks it is an error.
    """
    argument_checks.path("dst", dst)
    how = how or RunOptions()
    try:
        return _run(plan, dst, how, ranks)
    except CoarseScales as error:
        finer = with_exact_scales(plan, error.fqns) if ranks.world_size == 1 else None
        if finer is None:
            raise
        return _run(finer, dst, how, ranks)


def _run(plan: Plan, dst: str | os.PathLike[str], how: RunOptions, ranks: Ranks) -> Report:
    started = time.monotonic()
    plan.require_resolved()
    ranks.agree(plan.digest)
    target = named_place(dst)
    check_overlap([plan.ckpt.path, *plan.fingerprints], target)
    how = _settled(how, plan, ranks)
    complete = ranks.rank == 0 and _is_complete(plan, target, how)
    if ranks.of_lead(b"complete" if complete else b""):
        notes = [*plan.notes, "was complete already"]
        if ranks.rank == 0:
            notes += [
                *_own_sha256(plan, target, target, how.digest),
                *clear_published(target, plan.digest, how.sync),
            ]
        return _report(plan, target, started, plan.nbytes_out, notes)
    if how.overwrite and ranks.rank == 0:
        refuse_stranger(target, {*(file.out.name for file in plan.files), *plan.carried})
    notes, errors = list(plan.notes), {}
    with _workspace(plan, target, how.overwrite, ranks) as work, _discarded_if_coarse(work):
        out_dir, journal = _journal(plan, work, ranks)
        with journal:
            done = execute(
                plan.files, plan.encodes, plan.compares, plan.ckpt.files, out_dir, journal, how,
                manifest=lambda done: manifests.emit(manifests.build(plan, done)), ranks=ranks,
            )  # fmt: skip
        require_at_rest(
            plan.fingerprints, "nothing was published; convert again from a source at rest"
        )
        ranks.barrier()
        if work is not None:
            errors = _proven(plan, done, out_dir, how.digest)
            notes += _own_sha256(plan, target, out_dir / plan.files[0].out.name, how.digest)
            ranks.check()
            work.publish(how.sync)
            notes += work.notes
        ranks.barrier()
    return _report(plan, target, started, done.continued_nbytes, notes, errors)


def _settled(how: RunOptions, plan: Plan, ranks: Ranks) -> RunOptions:
    """With this rank's device, which was tried where the plan computes; and what shows progress."""
    device = ranks.device(how.device)
    requirements.require_libraries("xxhash", *["torch"] * bool(plan.encodes))
    if plan.encodes:
        requirements.require_device(device, f"--device {device}")
    shown = _printer(plan.nbytes_out) if how.progress is True else how.progress
    return replace(how, device=device, progress=shown)


@contextmanager
def _discarded_if_coarse(work: Workspace | None) -> Iterator[None]:
    """What was written by a plan that cannot be carried out is of no use to the next."""
    try:
        yield
    except CoarseScales:
        if work is not None:
            work.discard()
        raise


def _is_complete(plan: Plan, target: Path, how: RunOptions) -> bool:
    """A run of this plan was killed just after it published. Without digests nobody can tell: that
    run may not have waited for the disk. One that took fewer digests than are asked for is no run of
    this command."""
    found = manifest_at(target)
    if found is None or found.get("plan") != plan.digest:
        return False
    known = verify(target)
    if not known.ok or NO_DIGESTS in known.checks:
        return False
    if how.digest == "sha256" and not all("sha256" in file for file in found["files"].values()):
        return False
    if how.sync:
        sync_tree(target)
    return True


def _workspace(
    plan: Plan, target: Path, overwrite: bool, ranks: Ranks
) -> Workspace | nullcontext[None]:
    """Rank 0's to open, lock and publish; the others write into it."""
    if ranks.rank:
        return nullcontext()
    return Workspace.open(
        target, plan.digest, one_file=plan.one_file, overwrite=overwrite, nbytes=plan.nbytes_out
    )


def _journal(plan: Plan, work: Workspace | None, ranks: Ranks) -> tuple[Path, Journal]:
    """Where to write, and this rank's journal, opened once rank 0 has opened both."""
    if work is not None:
        journal = Journal(work.journal_path, plan.digest)
        ranks.of_lead(json.dumps([str(work.out_dir), str(work.journal_path)]).encode())
        return work.out_dir, journal
    out_dir, journal_path = map(Path, json.loads(ranks.of_lead(b"")))
    if not journal_path.is_file():
        raise DestinationError(
            "CKM304",
            f"{out_dir}: is not seen on this machine, but rank 0 has made it",
            "choose a destination on a file system that all ranks share",
        )
    return out_dir, Journal(journal_path, plan.digest, ranks.rank)


def _report(
    plan: Plan,
    target: Path,
    started: float,
    continued: int,
    notes: Sequence[str],
    errors: Mapping[str, float] | None = None,
) -> Report:
    return Report(
        str(target), len(plan.steps), plan.nbytes_in, plan.nbytes_out, time.monotonic() - started,
        plan.fidelities(), continued, plan.dropped, plan.tied, notes, errors or {},
    )  # fmt: skip


def _finish_directory(plan: Plan, done: Executed, out_dir: Path, digest: str) -> dict[str, Any]:
    """Carried files and the manifest, which a one-file output holds inside already."""
    if plan.one_file:
        return manifests.build(plan, done)
    names = [file.out.name for file in plan.files]
    try:
        for name, sibling in plan.carried.items():
            (out_dir / name).parent.mkdir(exist_ok=True)
            with (out_dir / name).open("wb") as stream:
                stream.writelines(sibling.pieces())
        sha256 = {name: sha256_of(out_dir / name) for name in names} if digest == "sha256" else {}
        document = manifests.build(plan, done, sha256)
        (out_dir / manifests.NAME).write_bytes(manifests.emit(document))
    except OSError as error:
        failed = RunError(
            "CKM306",
            f"{error.filename or out_dir}: write failed: {error.strerror}",
            "free some space, then run the same command again to continue",
        )
        raise short_of(error, failed) from error
    return document


def _proven(plan: Plan, done: Executed, out_dir: Path, digest: str) -> dict[str, float]:
    """Finish what was written and open it with our own readers: every tensor where the plan put it.
    Gives the measured error of what was quantized. Raises RunError CKM306 and CKM401, and CKM309
    where quantizing made finite values NaN or infinite."""
    with paused_gc():
        document = _finish_directory(plan, done, out_dir, digest)
        return _prove(
            plan, out_dir / plan.files[0].out.name if plan.one_file else out_dir, document
        )


def _own_sha256(plan: Plan, target: Path, written: Path, digest: str) -> list[str]:
    """What the manifest cannot state of the file that it lies in, the report does."""
    if digest != "sha256" or not plan.one_file:
        return []
    return [f"sha256 of {target}: {sha256_of(written)}"]


def _prove(plan: Plan, written: Path, document: Mapping[str, Any]) -> dict[str, float]:
    errors: dict[str, float] = {}
    lost = ""
    try:
        with open(written) as ckpt:
            problems = check_structure(ckpt, document)
            if not problems:
                errors, lost = _measure(plan, ckpt)
    except CkptmapError as error:
        problems = [str(error)]
    if problems:
        raise RunError(
            "CKM401",
            f"the output is not as planned: {problems[0]} ({counted(len(problems), 'problem')})",
            "nothing was published; this is a defect of ckptmap, please report it",
        )
    if lost:
        raise RunError(
            "CKM309",
            lost,
            "nothing was published; leave it as it is with --no-encode, or choose another encoding",
        )
    return errors


def _measure(plan: Plan, ckpt: Checkpoint) -> tuple[dict[str, float], str]:
    """Relative rms error of each quantized tensor, on a sample of rows spread over it; and which one
    decodes finite values to something else, "" where none does.

    `verify --against` measures every value; this costs a few milliseconds a tensor.
    """
    errors, losses = {}, []
    for step in plan.encodes:
        if step.fidelity not in ("codes", "quantize", "requantize"):
            continue
        mine = ckpt[step.tensor.fqn]
        found, lost = sampled_error(step.tensor, mine, SAMPLE_NUMEL)
        errors[step.tensor.fqn] = found
        if lost:
            losses.append(
                f"{step.tensor.fqn}: {mine.encoding} would decode {counted(lost, 'finite value')} of a"
                " sample to NaN or infinity"
            )
    more = f" (and {len(losses) - 1} more tensors)" if len(losses) > 1 else ""
    return errors, f"{losses[0]}{more}" if losses else ""


def _printer(total: int) -> Progress:
    """Progress for the Python API: a line on stderr every few seconds."""
    state = {"done": 0, "next": time.monotonic() + 5.0}

    def report(nbytes: int, key: str) -> None:
        state["done"] += nbytes
        if time.monotonic() >= state["next"]:
            state["next"] = time.monotonic() + 5.0
            print(f"{human(int(state['done']))} of {human(total)}  {key}", file=sys.stderr)

    return report
