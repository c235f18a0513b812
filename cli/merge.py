"""`ckptmap merge`: merge a LoRA adapter into its base, written in any setup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from ckptmap.core.printable import join
from ckptmap.errors import SourceError

from .completion import SETUPS
from .convert import show, told
from .printer import Printer
from .shared_parameters import DryRun, Dst, Json, Quiet
from .typed_options import TypedOptions, takes_options

EXAMPLES = (
    "ckptmap merge base-model/ adapter/ out/",
    "ckptmap merge base-nf4/ adapter/ out/ --to hf-bf16",
    "ckptmap merge hf://org/base hf://org/adapter out/ --to fsdp2 --world-size 8",
)

SWAPPED = "the base comes first, then the adapter"
"""How the hint on swapped arguments begins."""

To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="SETUP",
        show_default=False,
        autocompletion=SETUPS,
        help="Setup to write: hf, hf-bf16, fsdp2; default: setup and dtypes of BASE.",
    ),
]
AdapterConfig = Annotated[
    str | None,
    typer.Option(
        "--adapter-config",
        metavar="PATH",
        show_default=False,
        help="The adapter_config.json, if it is not beside ADAPTER.",
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Quantize the merged weights of a quantized BASE again; report the loss."
    ),
]

Leave = Annotated[
    list[str] | None,
    typer.Option(
        "--leave",
        metavar="GLOB",
        show_default=False,
        help="Leave this module or tensor of the adapter unmerged; repeatable.",
    ),
]


@takes_options(
    "world_size", "max_memory", "digest", "device", "threads", "overwrite", "include", "exclude", "drop",
    "like", "mesh", "tp_plan", "root",
    "strip_prefix", "rename", "add_prefix", "wrap", "exact_scales", "max_shard_size", "config_from",
    "low_disk", "sync", "check_source",
)  # fmt: skip
def command(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="The checkpoint that the adapter was trained on.")
    ],
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER", help="A peft directory or file, or a DCP directory of a peft model."
        ),
    ],
    dst: Dst,
    to: To = None,
    force: Force = False,
    adapter_config: AdapterConfig = None,
    leave: Leave = None,
    *,
    typed: TypedOptions,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Merge a LoRA adapter into its base model.

    rsLoRA, DoRA and modules_to_save are taken, too. Weights are added in fp32 and rounded once. BASE may be
    quantized. DST appears when it is complete.
    """
    from ckptmap.execution.ranks import ALONE
    from ckptmap.operations.convert import run
    from ckptmap.operations.merge import plan_merge, with_survival
    from ckptmap.operations.workspace import check_place

    how, options = typed.run_options(), typed.options_given()
    out, report = Printer(json, quiet), None
    with told(how, quiet, ALONE) as how:
        with _swapped_in_hints(base, adapter, out.args):
            plan = plan_merge(
                base, adapter, to,
                force=force, adapter_config=adapter_config, leave=tuple(leave or ()), **options,
            )  # fmt: skip
        with plan.ckpt:
            if dry_run:
                check_place(plan, dst, how.overwrite)
            else:
                report = with_survival(plan, run(plan, dst, how))
    show(plan, report, out)
    if report is None and plan.unresolved:
        raise typer.Exit(1)


@contextmanager
def _swapped_in_hints(base: str, adapter: str, args: Sequence[str]) -> Iterator[None]:
    """Put the whole command line into the hint where BASE and ADAPTER were swapped."""
    try:
        yield
    except SourceError as error:
        if error.hint.startswith(SWAPPED):
            line = list(args)
            line[args.index(base)], line[args.index(adapter)] = adapter, base
            error.hint = f"{SWAPPED}: {join(['ckptmap', *line])}"
        raise
