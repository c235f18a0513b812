"""Parameters that several commands share and that are no options of a conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from .completion import SETUPS

T = TypeVar("T", int, float)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a callback that refuses every other value."""

    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r}, expected one of {', '.join(choices)}")
        return value

    return check


def number(kind: Callable[[str], T], least: int) -> Callable[[str], T]:
    """Return a parser of numbers, `int` or `float`, that refuses those below `least` with a text of ours: that of
    typer differs from one version to the next, and may leave out what was typed."""
    what = "a whole number" if kind is int else "a number"

    def parse(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {what}") from None
        if not value >= least:  # NaN is refused, too
            raise typer.BadParameter(f"{text!r}, expected {what} of {least} or more")
        return value

    return parse


Src = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint: file, directory, hf://org/name.")
]
Dst = Annotated[
    str,
    typer.Argument(metavar="DST", help="Destination path; it becomes complete or is not touched."),
]
_TO = typer.Option(
    "--to",
    metavar="SETUP",
    show_default=False,
    help="Setup to convert to: hf, full-bf16, fsdp2-nf4; `ckptmap doctor` lists all.",
    autocompletion=SETUPS,
)
To = Annotated[str | None, _TO]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show no progress; print only the destination."),
]
NoProgress = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
