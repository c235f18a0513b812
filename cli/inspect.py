"""`ckptmap inspect`: show what a checkpoint holds, from its headers alone."""

from __future__ import annotations

from typing import Annotated

import typer

from .shared_parameters import Json, NoProgress
from .typed_options import TypedOptions, takes_options, typed_names
from .without_typer import show

EXAMPLES = (
    "ckptmap inspect runs/step-2000",
    "ckptmap inspect model.pt --keys 'model.layers.0.*'",
    "ckptmap inspect out/ --json",
    "ckptmap inspect out/ --shards",
    "ckptmap inspect hf://org/name",
)


@takes_options(
    "source_root",
    "like",
    "strip_prefix",
    "rename",
    "add_prefix",
    source_root="The dict that holds the weights.",
)
def command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: file or directory.")],
    keys: Annotated[
        str,
        typer.Option(
            "--keys", metavar="GLOB", show_default=False, help="List only tensors with these names."
        ),
    ] = "*",
    shards: Annotated[
        bool,
        typer.Option("--shards", help="Show which file and rank holds which part of which tensor."),
    ] = False,
    *,
    typed: TypedOptions,
    quiet: NoProgress = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint holds: format, names, dtypes, tensors.

    It reads headers only and unpickles nothing. It imports torch only where a config.json has to
    name optimizer state that is keyed by index.
    """
    names = typed_names(typed)
    root, like = typed.values["source_root"], typed.values["like"]
    show(path, keys, root, json, like, shards, names, quiet)
