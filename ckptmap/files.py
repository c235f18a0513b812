"""Read-only access to source files: a bounded set of open descriptors, whole reads or an error."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckptmap.errors import RunError, SourceError

MAX_OPEN = 128
"""Descriptors held at once: far below the usual soft limit of 1024, whatever the rank count."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that a file is still the one that was planned on."""

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: str) -> Fingerprint:
        stat = os.stat(file)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Files:
    """An LRU of descriptors, safe to share between threads; a descriptor in use is never closed."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # file -> [fd, users]

    @contextmanager
    def descriptor(self, file: str) -> Iterator[int]:
        with self._lock:
            entry = self._open.get(file)
            if entry is None:
                entry = self._open[file] = [self._open_file(file), 0]
            entry[1] += 1
            self._open.move_to_end(file)
            self._evict()
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def _open_file(self, file: str) -> int:
        try:
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(
                "CKM101",
                f"{file}: cannot be read: {error.strerror}",
                "check the path and its permissions",
            ) from error

    def _evict(self) -> None:
        if len(self._open) <= self._max_open:
            return
        idle = [file for file, entry in self._open.items() if entry[1] == 0]
        for file in idle[: max(0, len(self._open) - self._max_open)]:
            os.close(self._open.pop(file)[0])

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        with self.descriptor(file) as fd:
            try:
                data = os.pread(fd, nbytes, offset)
            except OSError:
                data = b""  # told below, with its reason
        if len(data) == nbytes:
            return data
        buffer = bytearray(nbytes)
        self.read_into(file, offset, [memoryview(buffer)])
        return bytes(buffer)

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers from consecutive bytes. Raises RunError where the file ends before."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        if not wanted:
            return
        with self.descriptor(file) as fd:
            try:
                done = os.preadv(fd, buffers, offset)
                while 0 < done < wanted:
                    more = os.preadv(fd, _after(buffers, done), offset + done)
                    if more == 0:
                        break
                    done += more
            except OSError as error:
                raise SourceError(
                    "CKM101",
                    f"{file}: cannot be read at byte {offset}: {error.strerror}",
                    "check the file and the disk it is on",
                ) from error
        if done < wanted:
            raise RunError(
                "CKM308",
                f"{file}: ended at byte {offset + done}, expected {offset + wanted}",
                "the source changed or is truncated; plan again from a complete checkpoint",
            )

    def close(self) -> None:
        with self._lock:
            for fd, _ in self._open.values():
                os.close(fd)
            self._open.clear()


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """The buffers that remain once `done` bytes are in."""
    rest = []
    for buffer in buffers:
        if done >= buffer.nbytes:
            done -= buffer.nbytes
        else:
            rest.append(buffer[done:])
            done = 0
    return rest
