"""`ckptmap convert`: plan a conversion and run it, by itself or as one of several ranks."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ckptmap.core.printable import join

from .option_table import TABLE
from .printer import Printer
from .shared_parameters import DryRun, Dst, Json, Quiet, Src, To, number
from .typed_options import TypedOptions, takes_options

if TYPE_CHECKING:
    from ckptmap.execution.ranks import Ranks
    from ckptmap.planning.options import Options, RunOptions
    from ckptmap.planning.plan import Plan
    from ckptmap.planning.report import Report

EXAMPLES = (
    "ckptmap convert runs/step-2000 out/ --to hf --config-from base-model/",
    "ckptmap convert runs/step-2000 out/ --to fsdp2-nf4 --world-size 8",
    "ckptmap convert model.pt out.pt --to compiled --wrap ddp,compile",
    "ckptmap convert ema.pt out.pt --to full --strip-prefix module --drop n_averaged",
    "ckptmap convert model.pt out/ --plan plan.json",
    "ckptmap convert runs/step-2000 out/ --as low-bit-release/",
    "ckptmap convert hf://org/name out/ --to fsdp2-nf4 --low-disk",
)


@takes_options(*TABLE)
def command(
    src: Src,
    dst: Dst,
    to: To = None,
    *,
    typed: TypedOptions,
    plan_file: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            show_default=False,
            help="Run this saved plan; the source must be unchanged.",
        ),
    ] = None,
    rank_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            parser=number(float, 1),
            help="Under torchrun: give up a rank after this time without a sign of life, 1 or more.",
        ),
    ] = 120.0,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint into another setup.

    DST appears by one rename when it is complete. SRC is never written. The same command continues
    a run that was stopped. Under torchrun the ranks share the work:
    torchrun --nproc-per-node 8 -m ckptmap convert SRC DST --to hf
    """
    from ckptmap.execution.ranks import ShownElsewhere, join
    from ckptmap.storage.hub.resolve import silence
    from ckptmap.storage.hub.uri import is_hub

    how, options = typed.run_options(), typed.options(to or "")
    _check_usage(options, plan_file)
    out, report = Printer(json, quiet), None
    if quiet and is_hub(src):
        silence()
    try:
        with join(rank_timeout) as ranks, told(how, quiet, ranks) as how:
            plan = _plan(src, options, plan_file)
            with plan.ckpt:
                report = _carried_out(plan, dst, how, ranks, dry_run)
    except ShownElsewhere as stopped:
        Printer.printed = True  # that rank prints the error document
        raise typer.Exit(stopped.exit_code) from stopped
    if ranks.rank == 0:
        show(plan, report, out)
    if report is None and plan.unresolved:
        raise typer.Exit(1)
    if ranks.world_size > 1:
        _leave()


def _leave() -> None:
    """End this rank at once: gloo may abort a process whose interpreter shuts down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _carried_out(
    plan: Plan, dst: str, how: RunOptions, ranks: Ranks, dry_run: bool
) -> Report | None:
    """Run the plan; of a dry run check the destination alone, and return None."""
    from ckptmap.operations.convert import run
    from ckptmap.operations.workspace import check_place

    if not dry_run:
        return run(plan, dst, how, ranks)
    check_place(plan, dst, how.overwrite)
    return None


def _check_usage(options: Options, plan_file: str | None) -> None:
    from ckptmap.planning.options import Options

    if plan_file is None and not options.to and options.as_ is None:
        raise typer.BadParameter("give --to SETUP (such as --to hf), --as PATH, or --plan FILE")
    if plan_file is not None and options != Options(to=""):
        raise typer.BadParameter("--plan holds the options of the conversion; give none beside it")


def _plan(src: str, options: Options, plan_file: str | None) -> Plan:
    import ckptmap

    if plan_file is None:
        return ckptmap.plan(src, options.to, options=options)
    return _load_plan(src, plan_file)


def _load_plan(src: str, plan_file: str) -> Plan:
    from pathlib import Path
    from shlex import quote

    from ckptmap.errors import PlanError
    from ckptmap.planning.saved_plan import replan
    from ckptmap.storage.hub.resolve import locate

    plan = replan(plan_file)
    located = locate(src, plan.ckpt.files.mounts)
    if located.origin != plan.ckpt.origin or (
        not located.origin and located.path.resolve() != Path(plan.ckpt.path).resolve()
    ):
        raise PlanError(
            "CKM209",
            f"{plan_file}: plans a conversion of {plan.ckpt.shown}, not of {src}",
            f"name {quote(plan.ckpt.shown)}, or plan {quote(src)} with the same options: ckptmap plan --help",
        )
    return plan


@contextmanager
def told(how: RunOptions, quiet: bool, ranks: Ranks) -> Iterator[RunOptions]:
    """Give the options with a progress that the first rank shows, in its first phase."""
    from dataclasses import replace

    from ckptmap.execution.phases import Phases
    from ckptmap.protocols.progress import READING

    from .progress import shown

    with shown(quiet, ranks.rank) as progress:
        phases = Phases.of(progress)
        phases.begin(READING)
        yield replace(how, progress=phases)


def show(plan: Plan, report: Report | None, out: Printer) -> None:
    if report is None:
        out.show(plan)
    elif out.quiet and not out.json:
        out.text(str(report.dst))
    else:
        out.show(report)
        if not out.json and "--plan" not in out.args and _lacks_config(plan):
            out.text(f"add its config.json with: {_with_config(plan, out.args)}")


def _lacks_config(plan: Plan) -> bool:
    """Return whether the output is for transformers, which loads it with a config.json only."""
    carries = plan.aim.setup.carrier is not None
    configs = {name.rpartition("/")[2] for name in plan.carried}  # not generation_config.json
    return carries and not configs & {"config.json", "adapter_config.json"}


def _with_config(plan: Plan, args: Sequence[str]) -> str:
    """Return the same command with a config, and with the change of names without which they do not fit it; MODEL
    is a directory, a config.json or a place on the Hub."""
    from ckptmap.planning.prefix_notes import HUB, foreign_scheme, prefix_change

    of_plan = plan.ckpt, plan.aim.setup, plan.options
    change = prefix_change(*of_plan)
    added = ["--config-from", "MODEL", *(["--overwrite"] if "--overwrite" not in args else [])]
    if change is not None:
        added = [*shlex.split(change.options), *added]
    elif foreign_scheme(*of_plan):
        added = [*HUB.split(), *added]
    return join(["ckptmap", *args, *added])
