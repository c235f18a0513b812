"""Errors of the operating system: a limit of the process is reached, or a file may not be read.

A limit of open files, of the size of a file, of memory or threads becomes a CKM313 whose hint says how to raise
it; a file that cannot be read a CKM101 that names it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ckptmap.core.printable import quote
from ckptmap.errors import CkptmapError, RunError, SourceError

SHORT = "CKM313"
FILES = 4096
"""A limit of open files (ulimit -n) that is enough for any conversion; nearly every host allows it."""
MEMORY_HINT = (
    "free some, raise the limit (ulimit -v, a container's), or give --threads 1 and a smaller "
    "--max-memory; then run the same command again"
)
THREADS_HINT = (
    "end other processes, raise the limit (ulimit -u, a container's pids), or give --threads 1; "
    "then run the same command again"
)
SIZE_HINT = (
    "raise the limit of a file's size (ulimit -f), choose a filesystem that holds larger files, or "
    "give a smaller --max-shard-size; then run the same command again"
)
UNMAPPED = ("cannot allocate memory", "failed to map segment", "cannot map", "cannot create shared")
"""Texts of the dynamic loader for a library that does not fit in memory."""

E = TypeVar("E", bound=CkptmapError)


def or_resource_error(error: BaseException, otherwise: E) -> E:
    """Return `otherwise`; if the process reached a limit, the same error with code CKM313 and its hint."""
    hint = _hint(error)
    return otherwise if hint is None else type(otherwise)(SHORT, otherwise.message, hint)


def resource_error(error: BaseException) -> RunError | None:
    """Return the RunError for an unexpected error if the process reached a limit, else None."""
    hint = _hint(error)
    if hint is None:
        return None
    said = " ".join(str(error).split()).partition(". This error may")[0]
    return RunError(SHORT, f"this process {_want(error)}" + (f": {said}" if said else ""), hint)


def _want(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "cannot open more files"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "cannot write a larger file"
    return "cannot start another thread" if _of_threads(error) else "ran out of memory"


def _hint(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return _way_to_files(error.errno)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return SIZE_HINT
    if _of_threads(error):
        return THREADS_HINT
    return MEMORY_HINT if _of_memory(error) else None


def _of_threads(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith("can't start new thread")


def _of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError | OSError):
        return any(words in str(error).lower() for words in UNMAPPED)
    of_device = type(error).__name__ == "OutOfMemoryError"  # torch's, which need not be imported
    torch_s = isinstance(error, RuntimeError) and (
        of_device or "can't allocate memory" in str(error)
    )
    return isinstance(error, MemoryError) or torch_s


def _way_to_files(number: int) -> str:
    """Return the hint with the `ulimit` command, up to the hard limit of this process."""
    if number == errno.ENFILE:
        return "the machine has too many files open: end what holds them, then try again"
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY or hard > FILES > soft else hard
    if most > soft:
        return f"ulimit -n {most}, then run the same command again"
    return (
        f"have the limit of {soft} open files (ulimit -n) raised, as in a new shell, and try again"
    )


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
