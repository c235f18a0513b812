"""`ckptmap report`: show a checkpoint as one HTML file."""

from __future__ import annotations

from typing import Annotated

import typer

from .completion import SETUPS
from .printer import Printer
from .typed_options import PLAN_OPTIONS, TypedOptions, takes_options

EXAMPLES = (
    "ckptmap report runs/step-2000",
    "ckptmap report out/ --against runs/step-2000 -o report.html",
    "ckptmap report model.pt --to hf-nf4 --to hf-int8 --values",
    "ckptmap report hf://org/name",
)

Save = Annotated[str, typer.Option("-o", metavar="FILE", help="The HTML file to write.")]
NameOnly = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the name of the file.")]


@takes_options(*PLAN_OPTIONS)
def command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint: file, directory, hf://org/name.")
    ],
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="B", show_default=False, help="Show what differs from B, too."
        ),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="SETUP",
            show_default=False,
            autocompletion=SETUPS,
            help="Show what a conversion to this setup would do; repeatable.",
        ),
    ] = None,
    values: Annotated[
        bool | None,
        typer.Option(
            "--values/--no-values",
            show_default=False,
            help="With --to: measure the errors of its encoding. Values are compared with --against"
            " unless --no-values is given.",
        ),
    ] = None,
    *,
    typed: TypedOptions,
    save: Save = "report.html",
    quiet: NameOnly = False,
) -> None:
    """Write one HTML file that shows what a checkpoint is.

    It shows what is wrong, and where the bytes lie. The file needs no network and runs nothing that a
    name in a checkpoint says. Options of a conversion hold for --to. Of a damaged checkpoint the file says what is wrong, and the exit code
    is 2.
    """
    from pathlib import Path

    import ckptmap
    from ckptmap.errors import SourceError
    from ckptmap.operations.report.file import require_outside, require_writable, write
    from ckptmap.operations.report.unreadable import unreadable

    wrote = save if quiet else f"wrote {save}"
    require_outside(save, path)
    require_writable(save)
    keywords = typed.options_given()
    try:
        page = ckptmap.report(path, against=against, to=to, values=values, **keywords)
    except SourceError as error:
        if Path(path).exists():  # a page can show what is wrong with it
            write(save, unreadable(path, error))
            Printer().text(wrote)
        raise
    write(save, page)
    Printer().text(wrote)
