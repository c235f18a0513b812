"""Errors of files that cannot be read: which one, why, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from ckptmap.errors import CkptmapError, SourceError
from ckptmap.storage.resource_limits import or_resource_error

__all__ = ["named_if_unreadable", "unreadable"]


def unreadable(file: str | os.PathLike[str], error: OSError) -> SourceError:
    """Return SourceError CKM101 for a file or directory that the system does not let the process read; CKM313
    where a limit of the process is the reason."""
    hint = "check the path and its disk"
    if isinstance(error, PermissionError):
        hint = f"check its permissions: ls -ld {quote(str(_closed_at(Path(file))))}"
    failed = SourceError("CKM101", f"{file}: cannot be read: {error.strerror or error}", hint)
    return or_resource_error(error, failed)


def _closed_at(file: Path) -> Path:
    """Return the file, or the first directory above it that the process may not enter: nothing in it is seen."""
    for above in reversed(file.parents):
        if not os.access(above, os.X_OK):
            return above
    return file


@contextmanager
def named_if_unreadable() -> Iterator[None]:
    """Turn an error of the system in the block, which only reads, into the error of the file that it names."""
    try:
        yield
    except CkptmapError:
        raise  # some are OSErrors, too
    except OSError as error:
        raise unreadable(os.fsdecode(error.filename or "a file"), error) from error
