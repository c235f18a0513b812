"""Open the files of a run's own bookkeeping: work directory, journal and lock. Nothing is followed.

They lie beside the destination, in a directory that others may write to. A symbolic link there, or
a second hard link, would let us write into a file of somebody else; a FIFO would let us wait for
ever. So only real directories and regular files with one name are used, and they must belong to the
user who runs us. Anything else raises DestinationError CKM304, which names it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptmap.core.printable import quote
from ckptmap.errors import DestinationError

MANIFEST = "ckptmap.manifest.json"
"""The manifest's name in a directory. It is published last, so it tells that all files are there."""
PENDING = ".ckptmap-publishing"
"""The file in a destination that is being published file by file: see `publish_by_marker`."""
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISREG, "a regular file"),
)
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""O_NONBLOCK returns at once from a FIFO that was put there after its kind was checked."""


def kind_of(mode: int) -> str:
    """Return the kind of a directory entry, by its `st_mode`, as messages call it."""
    return next((kind for matches, kind in _KINDS if matches(mode)), "of an unknown kind")


def odd_file(status: os.stat_result, linked: bool = False) -> str:
    """Return what keeps a file from being used; "" for a regular file with one name.

    `linked`: other hard links are allowed, because the file is only read.
    """
    if not stat.S_ISREG(status.st_mode):
        return f"is {kind_of(status.st_mode)}, expected a regular file"
    if status.st_nlink > 1 and not linked:
        return f"has {status.st_nlink} hard links, expected one"
    return ""


def refusal(path: str | os.PathLike[str], problem: str) -> DestinationError:
    return DestinationError(
        "CKM304",
        f"{os.fspath(path)}: {problem}; ckptmap uses nothing there that it did not make",
        f"see who put it there, remove it, then run again: rm -r {quote(os.fspath(path))}",
    )


def _require_plain(path: Path, linked: bool = False) -> bool:
    """Return whether a file is there. Raise DestinationError CKM304 where it must not be used."""
    try:
        problem = odd_file(os.lstat(path), linked)
    except FileNotFoundError:
        return False
    if problem:
        raise refusal(path, problem)
    return True


def open_plain(path: Path, flags: int, linked: bool = False) -> int:
    """Return a descriptor of an existing regular file. Raises OSError, DestinationError CKM304."""
    _require_plain(path, linked)
    try:
        fd = os.open(path, flags | _SAFE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise refusal(path, "was replaced by a link or a FIFO just now") from error
        raise
    problem = odd_file(os.fstat(fd), linked)  # again, because now it cannot be exchanged
    if problem:
        os.close(fd)
        raise refusal(path, problem)
    return fd


def read_plain(path: Path, linked: bool = False, limit: int = -1) -> bytes | None:
    """Return the content of a file, at most `limit` bytes; None if there is none.

    Raises OSError, DestinationError CKM304.
    """
    try:
        fd = open_plain(path, os.O_RDONLY, linked)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as stream:
        return stream.read(limit)


def write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that nobody else has made; one of an earlier run is removed first.

    Raises OSError, DestinationError CKM304.
    """
    if _require_plain(path):
        os.unlink(path)
    create(path, pieces)


def create(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that does not exist yet; remove it where the write fails. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)
    try:
        for piece in pieces:
            data = memoryview(piece).cast("B")
            while data.nbytes:
                data = data[os.write(fd, data) :]
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def own_directory(path: Path, uid: int) -> None:
    """Make a directory, or check that it is a real one of user `uid`.

    Raises OSError, DestinationError CKM304.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise refusal(path, f"is {kind_of(status.st_mode)}, expected a directory")
    _require_own(path, status, uid)


def require_own_tree(directory: Path, uid: int) -> None:
    """Raise DestinationError CKM304 for the first thing in a directory, at any depth, that is neither a
    directory nor a regular file with one name, or that belongs to another user."""
    for path, status in sorted(walk(directory)):
        _require_own(Path(path), status, uid)


def walk(directory: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every path below a directory with its status. Links are not followed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            yield entry.path, status
            if stat.S_ISDIR(status.st_mode):
                yield from walk(entry.path)


def _require_own(path: Path, status: os.stat_result, uid: int) -> None:
    is_directory = stat.S_ISDIR(status.st_mode)
    problem = "" if is_directory else odd_file(status)
    if not problem and status.st_uid != uid:
        problem = f"belongs to user {status.st_uid}, expected {uid}"
    if problem:
        raise refusal(path, problem)
