"""`ckptmap explain`: show what an error code means and what to do."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from .completion import CODES
from .printer import Printer
from .shared_parameters import Json

EXAMPLES = (
    "ckptmap explain CKM202",
    "ckptmap explain",
)


def command(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE",
            autocompletion=CODES,
            help="An error code, as CKM202; without it all codes are listed.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what an error code means and what to do about it."""
    from ckptmap import error_codes
    from ckptmap.core.formatting import terminal_width

    out = Printer(json)
    if code is None:
        titles = {name: entry.title for name, entry in error_codes.CODES.items()}
        text = "\n".join(f"{name}  {title}" for name, title in titles.items())
        out.document({"codes": titles}) if out.json else out.text(text)
        return
    name = code.strip().upper()
    name = name if name.startswith("CKM") else f"CKM{name}"
    if name not in error_codes.CODES:
        raise typer.BadParameter(f"{code!r} is no error code; `ckptmap explain` lists them")
    entry = error_codes.CODES[name]
    if out.json:
        out.document(
            {"code": name, "title": entry.title, "why": entry.why, "next": entry.next_step}
        )
    else:
        paragraphs = (f"{name}: {entry.title}", entry.why, f"Next: {entry.next_step}")
        width = terminal_width() or max(map(len, paragraphs))
        lines = [textwrap.fill(text, width, break_on_hyphens=False) for text in paragraphs]
        out.text("\n\n".join(lines))
