"""`ckptmap ls`: list the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .printer import Printer
from .shared_parameters import Json

EXAMPLES = ("ckptmap ls runs/", "ckptmap ls runs/ --json")


def command(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT",
            help="A directory of step-100, checkpoint-100 or checkpoint_100 directories.",
        ),
    ],
    json: Json = False,
) -> None:
    """List the checkpoints of a run, with their steps and metrics."""
    from ckptmap.operations.list_steps import list_steps

    Printer(json).show(list_steps(Path(root)))
