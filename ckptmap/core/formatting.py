"""Counts, sizes, names in order and the errors of other libraries as short text for people."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

FEW = 6
"""Names that an error, a hint or a note shows of a list."""
MAX_LINE = 400
"""Characters of another library's error that are shown."""


def counted(count: int, noun: str, one: str = "", many: str = "") -> str:
    """Return a count with its noun, and with the verb that agrees: "1 file", "1,024 entries", "2 files are"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeou" else f"{noun}s"
    text = f"{count:,} {noun if count == 1 else plural}"
    verb = one if count == 1 else many
    return f"{text} {verb}" if verb else text


def some(names: Sequence[object], shown: int = FEW) -> str:
    """Return the first names of a list, and how many more there are: "a, b, c and 23 more"; one name and the
    number of others where `shown` is 1."""
    if len(names) <= shown + (shown > 1):  # the last of several is no longer than "and 1 more"
        return ", ".join(map(str, names))
    return f"{', '.join(map(str, names[:shown]))} and {len(names) - shown:,} more"


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts rank_2 before rank_10."""
    return [(0, int(s)) if s.isdecimal() else (1, s) for s in re.split(r"(\d+)", name)]


def human(nbytes: int) -> str:
    """Return a number of bytes in binary units: 1536 -> "1.5 KiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is; None: it is a pipe or a file, of any width."""
    import shutil  # with the archives that it packs

    try:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    except (AttributeError, ValueError):  # stdout is closed
        return None


def fitted(heads: Sequence[str], tails: Sequence[str]) -> list[str]:
    """Return lines of a table: `head  tail`, the heads aligned.

    Where a line would be wider than the terminal, its tail stands below its head, in the column of the others: no name
    is cut, and one long name costs one line.
    """
    limit = terminal_width()
    beside = sys.maxsize if limit is None else limit - max(map(len, tails), default=0) - 4
    width = max((len(head) for head in heads if len(head) <= beside), default=0)
    lines = []
    for head, tail in zip(heads, tails, strict=True):
        if len(head) <= beside:
            lines.append(f"  {head:<{width}}  {tail}")
        else:
            lines += [f"  {head}", f"  {'':<{max(width, 2)}}  {tail}"]
    return lines


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not blank, else the name of its class.

    Errors of other libraries may have many lines, of which one fits into an error of ours.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:MAX_LINE] if lines else type(error).__name__
