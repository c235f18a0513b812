"""`ckptmap inspect`: what is this checkpoint? From headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from . import options as ask
from .output import Output

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
    json: ask.Json = False,
) -> None:
    """Show what a checkpoint is and holds: container, setup, wrappers, encodings, every tensor.

    Reads headers only; nothing is unpickled, torch is not imported.
    """
    _show(path, keys, root, json)


def _show(path: str, keys: str, root: str | None, json: bool) -> None:
    import ckptmap

    from .portrait import Portrait

    with ckptmap.open(path, root=root) as ckpt:
        Output(json).show(Portrait(ckpt, keys))


def at_once(args: Sequence[str]) -> bool:
    """Do what a plain `inspect PATH [--json]` asks for, without the parser: typer takes longer to
    get ready than reading the headers of most checkpoints. False: it is for the parser."""
    rest = [arg for arg in args[1:] if arg != "--json"]
    if list(args[:1]) != ["inspect"] or len(rest) != 1 or rest[0].startswith("-"):
        return False
    _show(rest[0], "*", None, "--json" in args)
    return True
