"""Stand between this process and the file system: count its calls, let one fail, or record all.

Calls of Python's `os` go through here, those of `open` (by the pure Python `io`) and of ctypes, too.
Only calls on paths below one folder are counted; `stat` and `close` are left alone.
"""

from __future__ import annotations

import _pyio
import builtins
import ctypes
import errno
import io
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

READS = ("read", "pread", "preadv")
WRITES = ("write", "pwrite", "pwritev", "copy_file_range", "sendfile")
BY_DESCRIPTOR = (*READS, *WRITES, "fsync", "fdatasync", "ftruncate")
BY_PATH = ("open", "mkdir", "rmdir", "unlink", "remove", "listdir", "scandir", "truncate", "chmod")
BY_TWO_PATHS = ("rename", "replace", "link", "symlink")
ERRNOS = (
    errno.EIO, errno.ENOSPC, errno.EACCES, errno.EINTR, errno.ESTALE, errno.EMFILE, errno.EDQUOT,
)  # fmt: skip
KILLS = ("kill", "kill after", "torn")
_REAL = {name: getattr(os, name) for name in (*BY_DESCRIPTOR, *BY_PATH, *BY_TWO_PATHS)}


@dataclass(frozen=True)
class Fault:
    """What happens at call number `at`: an errno, "short", or one of `KILLS`.

    `lasting`: every later call of the same kind fails, too, as on a full disk.
    """

    at: int
    kind: int | str
    lasting: bool = False

    @classmethod
    def drawn(cls, draw: random.Random, calls: int) -> Fault:
        errors = (draw.choice(ERRNOS), draw.choice(ERRNOS), "short")
        kind = draw.choice((draw.choice(errors), draw.choice(KILLS)))
        lasts = isinstance(kind, int) and kind != errno.EINTR and draw.random() < 0.3
        return cls(draw.randrange(calls), kind, lasts)

    @property
    def kills(self) -> bool:
        return self.kind in KILLS

    def __str__(self) -> str:
        kind = errno.errorcode[self.kind] if isinstance(self.kind, int) else self.kind
        return f"{kind}{' from' if self.lasting else ' at'} call {self.at}"


@dataclass
class Event:
    """A call that changed the file system, with the inode that it concerns."""

    call: str
    paths: tuple[str, ...]
    inode: int = 0
    offset: int = 0
    data: bytes = b""


class Calls:
    """The calls of this process on what lies below `folder`."""

    def __init__(self, folder: Path, fault: Fault | None = None) -> None:
        self.folder = os.path.realpath(folder)
        self.fault = fault
        self.count = 0
        self.failing = ""
        """The call that failed, with its paths."""
        self.events: list[Event] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in _REAL:
            patch.setattr(os, name, self._wrapped(name))
        patch.setattr(io, "open", _pyio.open)
        patch.setattr(builtins, "open", _pyio.open)
        library = ctypes.CDLL(None, use_errno=True)
        made = SimpleNamespace(
            renameat2=self._renameat2(library), fallocate=self._fallocate(library)
        )
        patch.setattr(ctypes, "CDLL", lambda *_, **__: made)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            paths = _paths(name, args, kwargs)
            return self._made(name, paths, lambda *given: _REAL[name](*given, **kwargs), args)

        return call

    def _made(self, name: str, paths: tuple[str, ...], real: Callable[..., Any], args: Any) -> Any:
        if not any(path.startswith(self.folder) for path in paths):
            return real(*args)
        kind = self._fault_now(name, paths)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in ("short", "torn"):
            args = _shortened(name, args)
        elif isinstance(kind, int):
            raise OSError(kind, os.strerror(kind), paths[0])
        existed = os.path.lexists(paths[-1]) if name == "open" else False
        done = real(*args)
        if kind in KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        self._record(name, paths, args, done, existed)
        return done

    def _fault_now(self, name: str, paths: tuple[str, ...]) -> int | str | None:
        number, self.count = self.count, self.count + 1
        fault = self.fault
        if fault is None or number < fault.at:
            return None
        if number == fault.at:
            self.failing = f"{name} {' '.join(map(os.path.basename, paths))}"
            return fault.kind
        return fault.kind if fault.lasting and name == self.failing.split()[0] else None

    # --------------------------------------------------------------------------- by ctypes

    def _renameat2(self, library: Any) -> Callable[..., int]:
        def call(_: int, old: bytes, __: int, new: bytes, flags: Any) -> int:
            name = "exchange" if flags.value == 2 else "rename"
            return self._answered(
                name, (os.fsdecode(old), os.fsdecode(new)),
                lambda: library.renameat2(-100, old, -100, new, flags),
            )  # fmt: skip

        return call

    def _fallocate(self, library: Any) -> Callable[..., int]:
        def call(fd: int, mode: int, offset: int, nbytes: int) -> int:
            real = library.fallocate
            real.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            return self._answered("fallocate", (_of(fd),), lambda: real(fd, mode, offset, nbytes))

        return call

    def _answered(self, name: str, paths: tuple[str, ...], real: Callable[[], int]) -> int:
        """Make a call of the C library, which returns -1 and sets errno where it fails."""
        try:
            return int(self._made(name, paths, real, ()))
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1

    # --------------------------------------------------------------------------- recorded

    def _record(
        self, name: str, paths: tuple[str, ...], args: Any, done: Any, existed: bool
    ) -> None:
        if name == "open":
            if args[1] & os.O_CREAT and not existed:
                self.events.append(Event("create", paths, os.fstat(done).st_ino))
            elif args[1] & os.O_TRUNC:
                self.events.append(Event("truncate", paths, os.fstat(done).st_ino))
        elif name in WRITES:
            self.events.append(_written(name, paths, args, done))
        elif name in ("fsync", "fdatasync", "ftruncate"):
            length = args[1] if name == "ftruncate" else 0
            call = "truncate" if name == "ftruncate" else "sync"
            self.events.append(Event(call, paths, os.fstat(args[0]).st_ino, length))
        elif name == "fallocate" and done == 0:
            status = os.stat(paths[0])
            self.events.append(Event("truncate", paths, status.st_ino, status.st_size))
        elif name in ("mkdir", "rename", "replace", "link") and not (
            name == "rename" and done == -1
        ):
            call = {"replace": "rename"}.get(name, name)
            self.events.append(Event(call, paths, os.lstat(paths[-1]).st_ino))
        elif (name == "exchange" and done == 0) or name in ("unlink", "remove", "rmdir"):
            self.events.append(Event(name if name == "exchange" else "unlink", paths))


def _paths(name: str, args: Any, kwargs: Any) -> tuple[str, ...]:
    if name in BY_DESCRIPTOR:
        return (_of(args[1] if name == "copy_file_range" else args[0]),)
    if name in BY_TWO_PATHS:
        return (_of(args[0], kwargs.get("src_dir_fd")), _of(args[1], kwargs.get("dst_dir_fd")))
    return (_of(args[0] if args else ".", kwargs.get("dir_fd")),)


def _of(path: Any, folder: int | None = None) -> str:
    """Return the absolute path of a path or descriptor, perhaps relative to an open folder."""
    if isinstance(path, int):
        try:
            return os.readlink(f"/proc/self/fd/{path}")
        except OSError:
            return ""
    base = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
    return os.path.normpath(Path.cwd() / base / os.fsdecode(path))


def _shortened(name: str, args: Any) -> Any:
    """Return the arguments of the same call for half of its bytes; of another call, the same."""
    if name in ("read", "pread"):
        return (args[0], max(1, args[1] // 2), *args[2:])
    if name in ("write", "pwrite") and len(args[1]) > 1:
        return (args[0], memoryview(args[1]).cast("B")[: len(args[1]) // 2], *args[2:])
    if name in ("preadv", "pwritev"):
        first = memoryview(args[1][0]).cast("B")
        return (args[0], [first[: max(1, len(first) // 2)]], *args[2:])
    if name in ("copy_file_range", "sendfile"):
        return (*args[:2], max(1, args[2] // 2), *args[3:])
    return args


def _written(name: str, paths: tuple[str, ...], args: Any, done: int) -> Event:
    """Return the event of a write, with the bytes that the file now has there."""
    fd = args[1] if name == "copy_file_range" else args[0]
    offset = args[2] if name in ("pwrite", "pwritev") else None
    if name == "copy_file_range" and len(args) > 4:
        offset = args[4]
    if offset is None:
        offset = os.lseek(fd, 0, os.SEEK_CUR) - done
    again = _REAL["open"](f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        data = _REAL["pread"](again, done, offset)
    finally:
        os.close(again)
    return Event("write", paths, os.fstat(fd).st_ino, offset, data)
