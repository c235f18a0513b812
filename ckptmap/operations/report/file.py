"""Write a report to a file; only a file that is a report is replaced."""

from __future__ import annotations

import os
from pathlib import Path

from ckptmap.errors import DestinationError
from ckptmap.storage.own_files import create

MARK = b'<meta name="generator" content="ckptmap report">'
HEAD = 4096
"""The mark lies within so many first bytes of every report."""


def require_outside(path: str | os.PathLike[str], source: str) -> None:
    """Raise DestinationError CKM304 where a report would be written into the checkpoint, or into a
    working directory that was removed."""
    try:
        folder, inside = Path(source), Path(path).absolute()
    except OSError as error:
        raise _unwritable(path, error) from error
    if folder.is_dir() and inside.resolve().is_relative_to(folder.resolve()):
        raise DestinationError(
            "CKM304",
            f"{path}: lies in {source}, and a checkpoint is never changed",
            "choose another place with -o FILE",
        )


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise DestinationError CKM304 where a report cannot be written at `path`: a file that is no
    report lies there, or there is no such directory."""
    file = Path(path)
    try:
        there = file.is_symlink() or file.exists()
    except OSError as error:
        raise _unwritable(path, error) from error
    if there:
        if not _is_report(file):
            raise DestinationError(
                "CKM304",
                f"{path}: is there already, and no report of ckptmap",
                "choose another name with -o FILE",
            )
    elif not file.parent.is_dir():
        raise DestinationError(
            "CKM304",
            f"{path}: cannot be written: there is no directory {file.parent}",
            "make the directory, or choose another place with -o FILE",
        )


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write the page, whole or not at all. Raises DestinationError CKM304."""
    require_writable(path)
    file = Path(path)
    made = file.with_name(f".{file.name[:200]}.{os.getpid()}")
    try:
        create(made, [text.encode("utf-8", "backslashreplace")])
        made.replace(file)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def _unwritable(path: str | os.PathLike[str], error: OSError) -> DestinationError:
    return DestinationError(
        "CKM304",
        f"{path}: cannot be written: {(error.strerror or str(error)).lower()}",
        "choose another place with -o FILE",
    )


def _is_report(file: Path) -> bool:
    """Return whether a plain file begins as a report does."""
    if file.is_symlink() or not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return MARK in stream.read(HEAD)
    except OSError:
        return False
