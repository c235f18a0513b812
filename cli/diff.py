"""`ckptmap diff`: compare two checkpoints by plain names; their setups may differ."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote
from typing import Annotated

import typer

from .printer import Printer
from .progress import shown
from .shared_parameters import Json, NoProgress
from .typed_options import TypedOptions, opened_source, takes_options, typed_names

EXAMPLES = (
    "ckptmap diff runs/step-2000 out/",
    "ckptmap diff model.pt out/ --values",
    "ckptmap diff ema.pt model.pt --strip-prefix module",
    "ckptmap diff hf://org/name out/",
)


@takes_options(
    "source_root",
    "like",
    "param_order",
    "strip_prefix",
    "rename",
    "add_prefix",
    strip_prefix="Remove these segments from the head of A's names that begin with them.",
    rename="Rename A's names by a pattern of whole names: 'encoder.{x}=layers.{x}'; repeatable.",
    add_prefix="Put these segments before all names of A.",
    source_root="The dict of A that holds the weights.",
    param_order="The names behind the indices of A's optimizer state.",
)
def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    values: Annotated[
        bool, typer.Option("--values", help="Also compare decoded values, bit for bit.")
    ] = False,
    *,
    typed: TypedOptions,
    quiet: NoProgress = False,
    json: Json = False,
) -> None:
    """Show what differs between two checkpoints.

    Names, shapes, dtypes, encodings and plain values (step, scheduler, settings of the optimizer) are
    compared. The exit code is 1 where they differ.
    """
    import ckptmap

    like = {"like": typed.values["like"]}
    with (
        shown(quiet) as progress,
        opened_source(a, typed) as one,
        opened_source(b, TypedOptions(like)) as two,
    ):
        report = ckptmap.diff(one, two, values=values, progress=progress, **typed_names(typed))
    if report.mended_by:
        report = replace(report, mended_by=f"{report.mended_by}{_again(typed)}")
    Printer(json).show(report)
    if not report.equal:
        raise typer.Exit(1)


def _again(typed: TypedOptions) -> str:
    """Return the options that say how A and B are read, for a command that is printed."""
    given = ((name, typed.values[name]) for name in ("source_root", "like", "param_order"))
    return "".join(
        f" --{name.replace('_', '-')} {quote(value)}" for name, value in given if value is not None
    )
