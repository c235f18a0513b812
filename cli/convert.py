"""`ckptmap convert`: plan, run, verify the structure, publish."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as ask
from .printer import Printer

if TYPE_CHECKING:
    from ckptmap.execution.ranks import Ranks
    from ckptmap.planning.options import Options, RunOptions
    from ckptmap.planning.plan import Plan
    from ckptmap.planning.report import Report

EXAMPLES = (
    "ckptmap convert runs/step-2000 out/ --to hf --config-from base-model/",
    "ckptmap convert runs/step-2000 out/ --to fsdp2-nf4 --world-size 8",
    "ckptmap convert model.pt out.pt --to compiled --wrap ddp,compile",
    "ckptmap convert model.pt out/ --plan plan.json",
    "ckptmap convert hf://org/name out/ --to fsdp2-nf4 --low-disk",
)

Dst = Annotated[str, typer.Argument(metavar="DST", help="Where to; made complete or not at all.")]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="SETUP",
        show_default=False,
        help="What to convert to: hf, full-bf16, fsdp2-nf4.",
    ),
]
PlanFile = Annotated[
    str | None,
    typer.Option("--plan", metavar="FILE", show_default=False, help="Run exactly this saved plan."),
]
MaxMemory = Annotated[
    str,
    typer.Option(
        "--max-memory", metavar="SIZE", help="Bound of all buffers of a rank, 2MiB or more."
    ),
]
Digest = Annotated[
    str,
    typer.Option(
        "--digest",
        metavar="xxh3|sha256|none",
        callback=ask.one_of("xxh3", "sha256", "none"),
        help="Of what is written: xxh3 of every tensor, or sha256 of every file as well. Without"
        " any, `verify` can check structure only, and a killed run begins anew.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where arithmetic runs: cpu, cuda, cuda:1.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, show_default=False, help="Default: by the cores.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST once the new one is whole.")
]
RankTimeout = Annotated[
    float,
    typer.Option(
        "--rank-timeout",
        metavar="SECONDS",
        min=1.0,
        help="Under torchrun: give up when a rank shows no sign of life for so long.",
    ),
]
LowDisk = Annotated[
    bool,
    typer.Option(
        "--low-disk", help="From hf://: keep one file of SRC at a time, beside DST, not the cache."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")]


def command(
    src: ask.Src,
    dst: Dst,
    to: To = None,
    world_size: ask.WorldSize = None,
    max_memory: MaxMemory = "64MiB",
    digest: Digest = "xxh3",
    device: Device = "cpu",
    threads: Threads = None,
    overwrite: Overwrite = False,
    include: ask.Include = None,
    exclude: ask.Exclude = None,
    drop: ask.Drop = None,
    optimizer: ask.Optimizer = "keep",
    optimizer_keys: ask.OptimizerKeys = "fqn",
    param_order: ask.ParamOrder = None,
    like: ask.Like = None,
    mesh: ask.Mesh = None,
    tp_plan: ask.TpPlan = None,
    fsdp_units: ask.FsdpUnits = None,
    use_orig_params: ask.UseOrigParams = False,
    root: ask.Root = None,
    source_root: ask.SourceRoot = None,
    wrap: ask.Wrap = None,
    names_like: ask.NamesLike = None,
    names: ask.Names = None,
    names_from: ask.NamesFrom = None,
    encode: ask.Encode = None,
    no_encode: ask.NoEncode = None,
    strict: ask.Strict = False,
    exact_scales: ask.ExactScales = False,
    base: ask.Base = None,
    max_shard_size: ask.MaxShardSize = None,
    config_from: ask.ConfigFrom = None,
    plan_file: PlanFile = None,
    rank_timeout: RankTimeout = 120.0,
    low_disk: LowDisk = False,
    no_sync: ask.NoSync = False,
    dry_run: DryRun = False,
    quiet: ask.Quiet = False,
    json: ask.Json = False,
) -> None:
    """Convert a checkpoint into another setup.

    DST appears by one rename when it is complete; SRC is never written. A run that was stopped is
    continued by the same command. Under torchrun the ranks share the work:
    torchrun --nproc-per-node 8 -m ckptmap convert SRC DST --to hf
    """
    from ckptmap.execution.ranks import ShownElsewhere, join
    from ckptmap.planning.options import RunOptions
    from ckptmap.storage.hub.resolve import silence
    from ckptmap.storage.hub.uri import is_hub

    from .asked import options

    limit = ask.parse_memory(max_memory)
    asked = options(
        to or "", world_size=world_size, include=include, exclude=exclude, drop=drop,
        optimizer=optimizer, optimizer_keys=optimizer_keys, param_order=param_order, like=like,
        mesh=mesh, tp_plan=tp_plan, fsdp_units=fsdp_units, use_orig_params=use_orig_params,
        root=root, source_root=source_root, wrap=wrap, names_like=names_like,
        names=names, names_from=names_from,
        exact_scales=exact_scales, base=base, strict=strict,
        encode=encode, no_encode=no_encode, max_shard_size=max_shard_size, config_from=config_from,
    )  # fmt: skip
    _check_usage(asked, plan_file)
    out, report = Printer(json, quiet), None
    if quiet and is_hub(src):
        silence()
    try:
        with join(rank_timeout) as ranks:
            plan = _plan(src, asked, plan_file)
            if not dry_run:
                how = RunOptions(
                    device=device, threads=threads, max_memory=limit, overwrite=overwrite,
                    digest=digest, low_disk=low_disk, sync=not no_sync,
                )  # fmt: skip
                report = executed(plan, dst, how, out, ranks)
    except ShownElsewhere as stopped:
        Printer.printed = True  # by that rank
        raise typer.Exit(stopped.exit_code) from stopped
    if ranks.rank == 0:
        show(plan, report, out)
    if report is None and plan.unresolved:
        raise typer.Exit(1)
    if ranks.world_size > 1:
        _leave()


def _leave() -> None:
    """End this rank now: gloo may abort a process that ends the ordinary way, all work done."""
    from ckptmap.storage.files import let_go

    sys.stdout.flush()
    sys.stderr.flush()
    let_go()
    os._exit(0)


def _check_usage(asked: Options, plan_file: str | None) -> None:
    from ckptmap.planning.options import Options

    if plan_file is None and not asked.to:
        raise typer.BadParameter("give --to SETUP, or --plan FILE")
    if plan_file is not None and asked != Options(to=""):
        raise typer.BadParameter("--plan holds the options of the conversion; give none beside it")


def _plan(src: str, asked: Options, plan_file: str | None) -> Plan:
    import ckptmap

    if plan_file is None:
        return ckptmap.plan(src, asked.to, options=asked)
    return _saved(src, plan_file)


def _saved(src: str, plan_file: str) -> Plan:
    from pathlib import Path
    from shlex import quote

    from ckptmap.errors import PlanError
    from ckptmap.planning.saved_plan import replan
    from ckptmap.storage.hub.resolve import locate

    plan = replan(plan_file)
    here = locate(src)
    if here.origin != plan.ckpt.origin or (
        not here.origin and here.path.resolve() != Path(plan.ckpt.path).resolve()
    ):
        raise PlanError(
            "CKM209",
            f"{plan_file}: plans a conversion of {plan.ckpt.shown}, not of {src}",
            f"name {quote(plan.ckpt.shown)}, or plan {quote(src)} with the same options: ckptmap plan --help",
        )
    return plan


def executed(plan: Plan, dst: str, how: RunOptions, out: Printer, ranks: Ranks) -> Report:
    """With its progress on stderr; of several ranks, rank 0's."""
    from dataclasses import replace

    from ckptmap.operations.convert import run

    from .progress import Progress

    if out.quiet or ranks.rank:
        return run(plan, dst, how, ranks)
    progress = Progress(plan.nbytes_out)
    try:
        return run(plan, dst, replace(how, progress=progress), ranks)
    finally:
        progress.close()


def show(plan: Plan, report: Report | None, out: Printer) -> None:
    if report is None:
        out.show(plan)
    elif out.quiet and not out.json:
        out.text(str(report.dst))
    else:
        out.show(report)
