"""Parameters that several commands share and that are no options of a conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer


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
Dst = Annotated[str, typer.Argument(metavar="DST", help="Where to; made complete or not at all.")]
_TO = typer.Option(
    "--to",
    metavar="SETUP",
    show_default=False,
    help="What to convert to: hf, full-bf16, fsdp2-nf4.",
)
To = Annotated[str | None, _TO]
RequiredTo = Annotated[str, _TO]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress; on stdout the destination only."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
