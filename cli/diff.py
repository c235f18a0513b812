"""`ckptmap diff`: compare two checkpoints by plain names; their setups may differ."""

from __future__ import annotations

from typing import Annotated

import typer

from .printer import Printer
from .shared_parameters import Json
from .typed_options import TypedOptions, opened_source, takes_options

EXAMPLES = (
    "ckptmap diff runs/step-2000 out/",
    "ckptmap diff model.pt out/ --values",
    "ckptmap diff hf://org/name out/",
)


@takes_options(
    "source_root",
    "like",
    "param_order",
    source_root="The dict of A that holds the weights.",
    param_order="The names behind the indices of A's optimizer state.",
)
def command(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    values: Annotated[
        bool, typer.Option("--values", help="Also compare decoded values, bit for bit.")
    ] = False,
    *,
    typed: TypedOptions,
    json: Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, encodings, and values beside tensors (step,
    scheduler, settings of the optimizer). The exit code is 1 where they differ."""
    import ckptmap

    like = {"like": typed.values["like"]}
    with opened_source(a, typed) as one, opened_source(b, TypedOptions(like)) as two:
        report = ckptmap.diff(one, two, values=values)
    Printer(json).show(report)
    if not report.equal:
        raise typer.Exit(1)
