"""Wait until files and directories are on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def sync_tree(path: Path) -> None:
    """Sync one file, or every file below a directory and then every directory, innermost first."""
    if not path.is_dir():
        sync(path)
        return
    for file in files_below(path):
        sync(file)
    sync_directories(path)


def sync_directories(path: Path) -> None:
    """Sync a directory and every directory below it, innermost first. Raises OSError."""
    for folder, _, _ in os.walk(path, topdown=False, onerror=raised):
        sync(folder)


def sync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_below(directory: Path) -> Iterator[str]:
    """Yield the path of everything below a directory that is not a directory itself.

    Raises OSError, also where the directory is missing.
    """
    for folder, folders, names in os.walk(directory, onerror=raised):
        links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
        yield from (os.path.join(folder, name) for name in (*names, *links))


def raised(error: OSError) -> None:
    """Raise the error: as `onerror` of os.walk, which else leaves out what it cannot list."""
    raise error
