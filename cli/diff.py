"""`ckptmap diff`: two checkpoints, by plain names, whatever setups they are in."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as ask
from .asked import source
from .printer import Printer

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
    source_root: Annotated[
        str | None,
        typer.Option(
            "--source-root",
            metavar="KEY",
            show_default=False,
            help="The dict of A that holds the weights.",
        ),
    ] = None,
    like: ask.Like = None,
    param_order: Annotated[
        str | None,
        typer.Option(
            "--param-order",
            metavar="FILE",
            show_default=False,
            help="Which parameters the indices of A's optimizer state mean.",
        ),
    ] = None,
    json: ask.Json = False,
) -> None:
    """Compare names, shapes, dtypes, encodings, and what both hold beside tensors (step, scheduler,
    settings of the optimizer); exit code 1 where they differ."""
    import ckptmap

    one, two = source(a, source_root, like, param_order), source(b, like=like)
    report = ckptmap.diff(one, two, values=values)
    Printer(json).show(report)
    if not report.equal:
        raise typer.Exit(1)
