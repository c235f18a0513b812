"""convert(): make a plan, open a workspace beside the destination, execute, prove, publish.

Several ranks may work together: each makes the same plan and writes its share of the output.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Unpack

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core import argument_checks
from ckptmap.core.bool_check import NotBool
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.log import log
from ckptmap.core.printable import advised, one_line
from ckptmap.core.quantized_codes import CoarseScales
from ckptmap.core.signatures import spelled_out
from ckptmap.core.state_paths import role_and_fqn
from ckptmap.errors import RunError, SourceError
from ckptmap.execution import check_source
from ckptmap.execution import manifest as manifests
from ckptmap.execution.execute import execute
from ckptmap.execution.phases import Phases
from ckptmap.execution.ranks import ALONE, Ranks
from ckptmap.execution.unchanged import unchanged_weights
from ckptmap.operations.workspace import Workspace, require_place
from ckptmap.planning.options import ConvertKeywords, Options, RunOptions, separated
from ckptmap.planning.plan import Plan
from ckptmap.planning.planner import plan as make_plan
from ckptmap.planning.planner import plan_with_unchanged
from ckptmap.planning.report import Likeness, Report
from ckptmap.planning.saved_plan import hint_of_values, with_exact_scales
from ckptmap.protocols.progress import READING
from ckptmap.storage.hub.resolve import origins_in_errors
from ckptmap.storage.source_sums import SourceCheck
from ckptmap.typed_options import as_given


@spelled_out(RunOptions, Options)
def convert(
    src: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    to: str = "",
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
    how = replace(how, progress=Phases.on_rank(ranks.rank, how.progress))
    Phases.of(how.progress).begin(READING)
    plan = make_plan(src, to, options=options)
    if isinstance(src, Checkpoint):
        return run(plan, dst, how, ranks)
    with plan.ckpt:
        return run(plan, dst, how, ranks)


@tensors_on_cpu()
def run(
    plan: Plan, dst: str | os.PathLike[str], how: RunOptions | None = None, ranks: Ranks = ALONE
) -> Report:
    """Execute a plan into `dst`. Every rank calls it with the same plan and gets a report.

    Where outliers make the block scales of a tensor too coarse, the plan is made again with exact
    scales for it, if its scheme has a form for them, and the report says so. Several ranks raise
    CoarseScales instead.
    """
    argument_checks.path("dst", dst)
    how = how or RunOptions()
    with origins_in_errors(plan.ckpt.files.mounts):
        try:
            return _run(plan, dst, how, ranks)
        except CoarseScales as error:
            if plan.reference is not None:  # which decides how scales are stored
                raise RunError(error.code, error.message, _OTHER_FORM) from error
            finer = with_exact_scales(plan, error.fqns) if ranks.world_size == 1 else None
            if finer is None:
                raise
            return _run(finer, dst, how, ranks)
        except NotBool as error:
            role, fqn = role_and_fqn(plan.keys[error.path])
            option = "--optimizer drop" if role == "optimizer" else advised(drop=fqn)
            raise RunError(
                error.code, error.message, f"{error.hint}; or leave it out with {option}"
            ) from error
        except (RunError, SourceError) as error:
            if as_given("--no-encode") not in error.hint:
                raise
            hint: str | None = _OTHER_VALUES
            if plan.reference is None:
                fqn = error.message.partition(": ")[0]
                hint = hint_of_values(plan, fqn, isinstance(error, RunError))
            if hint is None:
                raise
            raise type(error)(error.code, error.message, hint) from error


_OTHER_VALUES = "repair the tensor where it was trained; or say which form to write in place of --as: --to hf-bf16"
_OTHER_FORM = "the checkpoint of --as has no other scales: say which form to write, --to hf-bf16, or --to hf-bnb-nf4-dq --exact-scales"


def _run(plan: Plan, dst: str | os.PathLike[str], how: RunOptions, ranks: Ranks) -> Report:
    started = time.monotonic()
    log.info(
        "write %s: %s of %s, plan %s",
        one_line(str(dst)), plan.aim.text, one_line(plan.ckpt.shown), plan.digest[:12],
    )  # fmt: skip
    plan.require_resolved()
    ranks.agree(plan.digest)
    compared = SourceCheck()
    if plan.reference is not None and plan.reference.unchanged is None:
        require_place(plan, dst, how.overwrite)
        plan, compared = _with_unchanged(plan, how, ranks)
    workspace = Workspace(plan, dst, how, ranks)
    if workspace.is_published():
        workspace.clear()
        return _report(plan, workspace, started, plan.nbytes_out, {})
    with workspace, check_source.compared(plan.ckpt, workspace.how.check_source):
        done = execute(
            plan.files, plan.encodes, plan.compares, plan.ckpt.files,
            workspace.out_dir, workspace.journal, workspace.how,
            manifest=lambda done: manifests.emit(manifests.build(plan, done)), ranks=ranks,
        )  # fmt: skip
        errors = workspace.prove(done)
        workspace.publish()
    workspace.notes += check_source.source_notes(done.source)
    for note in (*plan.notes, *workspace.notes):
        log.warning("%s", one_line(note))
    return replace(
        _report(plan, workspace, started, done.continued_nbytes, errors),
        source=done.source + SourceCheck(compared.checked),
    )


def _with_unchanged(plan: Plan, how: RunOptions, ranks: Ranks) -> tuple[Plan, SourceCheck]:
    """Return the plan in which unchanged weights are the bytes of the checkpoint of --as, and what was
    compared with stated checksums on the way."""
    files = plan.ckpt.files
    with check_source.compared(plan.ckpt, how.check_source):
        unchanged = unchanged_weights(plan, how, ranks)
        done = check_source.settle(files, ranks, resumed=(), whole=False)
    plan = plan_with_unchanged(plan, unchanged)
    plan.require_resolved()
    ranks.agree(plan.digest)
    return plan, done


def _report(
    plan: Plan,
    workspace: Workspace,
    started: float,
    continued_nbytes: int,
    errors: dict[str, float],
) -> Report:
    return Report(
        dst=str(workspace.dst),
        tensors=len(plan.steps),
        nbytes_in=plan.nbytes_in,
        nbytes_out=plan.nbytes_out,
        seconds=time.monotonic() - started,
        fidelity=plan.fidelities(),
        continued_nbytes=continued_nbytes,
        dropped=plan.dropped,
        tied=plan.tied,
        notes=[*plan.notes, *workspace.notes],
        errors=errors,
        likeness=None if plan.reference is None else Likeness.of(plan.reference, plan.steps),
    )
