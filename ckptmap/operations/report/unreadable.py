"""The report of a path that is no checkpoint, or a damaged one: what is wrong with it, and its files."""

from __future__ import annotations

import os
from pathlib import Path

from ckptmap.core.formatting import human
from ckptmap.core.printable import one_line
from ckptmap.errors import SourceError
from ckptmap.operations.report import html
from ckptmap.operations.report.collect import shown_name
from ckptmap.operations.report.provenance import FILES
from ckptmap.version import __version__


def unreadable(path: str | os.PathLike[str], error: SourceError) -> str:
    """Return one HTML file about a local path that `error` keeps from being shown."""
    files = _files(Path(path))
    more = len(files) - FILES
    typed, absolute = os.fspath(path), os.path.abspath(path)  # noqa: PTH100 (as errors name it)
    return html.plain(
        "unreadable.html",
        title=one_line(typed),
        problem=one_line(error.message.replace(absolute, typed)),
        hint=one_line(error.hint.replace(absolute, typed)),
        code=error.code,
        count=len(files),
        files=[*files[:FILES], *([("and", f"{more:,} more")] if more > 0 else [])],
        version=__version__,
    )


def _files(path: Path) -> list[tuple[str, str]]:
    """Return the names and sizes of a file, or of the files in a directory, as far as they can be listed."""
    try:
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        return [(shown_name(file.name), _size(file)) for file in found]
    except OSError:
        return []


def _size(file: Path) -> str:
    try:
        return "directory" if file.is_dir() else human(file.stat().st_size)
    except OSError:
        return "cannot be read"
