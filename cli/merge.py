"""`ckptmap merge`: a base and a LoRA adapter into one checkpoint, in any setup."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import options as ask
from .convert import (
    Device,
    Digest,
    DryRun,
    Dst,
    LowDisk,
    MaxMemory,
    Overwrite,
    Threads,
    executed,
    show,
)
from .printer import Printer

EXAMPLES = (
    "ckptmap merge base-model/ adapter/ out/",
    "ckptmap merge base-nf4/ adapter/ out/ --to hf-bf16",
    "ckptmap merge hf://org/base hf://org/adapter out/ --to fsdp2 --world-size 8",
)

To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="SETUP",
        show_default=False,
        help="What to write: hf, hf-bf16, fsdp2; default: the setup and the dtypes of BASE.",
    ),
]
AdapterConfig = Annotated[
    str | None,
    typer.Option(
        "--adapter-config",
        metavar="PATH",
        show_default=False,
        help="The adapter_config.json, where it is not beside ADAPTER.",
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Merge a quantized BASE back into a grid, and say how much survived."
    ),
]

Leave = Annotated[
    list[str] | None,
    typer.Option(
        "--leave",
        metavar="GLOB",
        show_default=False,
        help="Do not merge this module or tensor of the adapter; repeatable.",
    ),
]


def command(
    base: Annotated[str, typer.Argument(metavar="BASE", help="What the adapter was trained on.")],
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="A peft directory or file, or DCP of a model.")
    ],
    dst: Dst,
    to: To = None,
    force: Force = False,
    adapter_config: AdapterConfig = None,
    leave: Leave = None,
    world_size: ask.WorldSize = None,
    max_memory: MaxMemory = "64MiB",
    digest: Digest = "xxh3",
    device: Device = "cpu",
    threads: Threads = None,
    overwrite: Overwrite = False,
    mesh: ask.Mesh = None,
    tp_plan: ask.TpPlan = None,
    wrap: ask.Wrap = None,
    exact_scales: ask.ExactScales = False,
    max_shard_size: ask.MaxShardSize = None,
    config_from: ask.ConfigFrom = None,
    low_disk: LowDisk = False,
    no_sync: ask.NoSync = False,
    dry_run: DryRun = False,
    quiet: ask.Quiet = False,
    json: ask.Json = False,
) -> None:
    """Merge a LoRA adapter (rsLoRA, DoRA, modules_to_save) into its base, tensor by tensor.

    Merged in fp32 and rounded once. BASE may be quantized; DST appears when it is complete.
    """
    from ckptmap.execution.ranks import ALONE
    from ckptmap.operations.merge import plan_merge, with_survival
    from ckptmap.planning.options import RunOptions

    given: dict[str, Any] = {
        "world_size": world_size, "mesh": mesh, "tp_plan": tp_plan, "config_from": config_from,
    }  # fmt: skip
    if wrap is not None:
        given["wrap"] = tuple(name for name in wrap.split(",") if name)
    if exact_scales:
        given["exact_scales"] = ("*",)
    if max_shard_size is not None:
        given["max_shard_nbytes"] = ask.parse_nbytes(max_shard_size)
    nbytes = ask.parse_memory(max_memory)
    given |= {"force": force, "adapter_config": adapter_config, "leave": tuple(leave or ())}
    plan = plan_merge(base, adapter, to, **given)
    out, report = Printer(json, quiet), None
    if not dry_run:
        how = RunOptions(
            device=device, threads=threads, max_memory=nbytes, overwrite=overwrite, digest=digest,
            low_disk=low_disk, sync=not no_sync,
        )  # fmt: skip
        report = with_survival(plan, executed(plan, dst, how, out, ALONE))
    show(plan, report, out)
    if report is None and plan.unresolved:
        raise typer.Exit(1)
