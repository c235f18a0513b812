"""`ckptmap verify`: check that an output is complete, and that its values are the source's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from .printer import Printer
from .progress import shown
from .shared_parameters import Json, NoProgress
from .typed_options import TypedOptions, opened_source, takes_options

EXAMPLES = (
    "ckptmap verify out/",
    "ckptmap verify out/ --against runs/step-2000",
    "ckptmap verify out/ --against base-model/ --adapter adapter/",
    "ckptmap verify out/ --against runs/qlora/ --base base-model-nf4/",
    "ckptmap verify out/ --against local-ranks/ --like config.json",
)


@takes_options("base", "source_root", "like", "param_order")
def command(
    dst: Annotated[str, typer.Argument(metavar="DST", help="An output of `ckptmap convert`.")],
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="SRC",
            show_default=False,
            help="Compare values with this source, as strictly as the fidelity of each allows.",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="PATH",
            show_default=False,
            help="The adapter that `ckptmap merge` merged into SRC.",
        ),
    ] = None,
    *,
    typed: TypedOptions,
    quiet: NoProgress = False,
    json: Json = False,
) -> None:
    """Prove that an output is whole, and equal to its source.

    Files, sizes and digests are compared with the manifest of DST, values with SRC if --against names
    it. The exit code is 1 where something is wrong.
    """
    import ckptmap

    of_source = [typed.values[name] for name in ("source_root", "like", "param_order")]
    if against is None and any(value is not None for value in of_source):
        raise typer.BadParameter("--source-root, --like and --param-order are of --against SRC")
    source = nullcontext(None) if against is None else opened_source(against, typed)
    with shown(quiet) as progress, source as src:
        report = ckptmap.verify(
            dst, against=src, adapter=adapter, base=typed.values["base"], progress=progress
        )
    Printer(json).show(report)
    if not report.ok:
        raise typer.Exit(1)
