"""Parameters that several commands share and that are no options of a conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from .completion import SETUPS


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a callback that refuses every other value."""

    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r}, expected one of {', '.join(choices)}")
        return value

    return check


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
    help="Setup to convert to: hf, full-bf16, fsdp2-nf4.",
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
