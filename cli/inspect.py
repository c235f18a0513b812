"""`ckptmap inspect`: what is this checkpoint? From headers alone."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as ask
from .inspect_without_typer import show

EXAMPLES = (
    "ckptmap inspect runs/step-2000",
    "ckptmap inspect model.pt --keys 'model.layers.0.*'",
    "ckptmap inspect out/ --json",
    "ckptmap inspect hf://org/name",
)


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: file or directory.")],
    keys: Annotated[
        str,
        typer.Option(
            "--keys", metavar="GLOB", show_default=False, help="List only tensors named so."
        ),
    ] = "*",
    root: Annotated[
        str | None,
        typer.Option(
            "--source-root",
            metavar="KEY",
            show_default=False,
            help="The dict that holds the weights.",
        ),
    ] = None,
    like: ask.Like = None,
    json: ask.Json = False,
) -> None:
    """Show what a checkpoint is and holds: container, setup, wrappers, encodings, every tensor.

    Reads headers only; nothing is unpickled, torch is not imported.
    """
    show(path, keys, root, json, like)
