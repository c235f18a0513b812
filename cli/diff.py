"""`ckptmap diff`: two checkpoints, by plain names, whatever setups they are in."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as ask
from .output import Output

EXAMPLES = (
    "ckptmap diff runs/step-2000 out/",
    "ckptmap diff model.pt out/ --values",
    "ckptmap diff hf://org/name out/",
)


def command(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    values: Annotated[
        bool, typer.Option("--values", help="Compare decoded values too, bit for bit.")
    ] = False,
    json: ask.Json = False,
) -> None:
    """Compare names, shapes, dtypes and encodings; exit code 1 where they differ."""
    import ckptmap

    report = ckptmap.diff(a, b, values=values)
    Output(json).show(report)
    if not report.equal:
        raise typer.Exit(1)
