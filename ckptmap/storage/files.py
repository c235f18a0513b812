"""Read bytes of source files: a bounded set of open descriptors, and whole reads or an error.

All bytes of a source are read here. A file may be a placeholder of one that is not on the local
disk; then a mounted file system gives the bytes, see `ckptmap.protocols.file_systems`.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import repeat
from pathlib import Path

from ckptmap.errors import RunError, SourceError
from ckptmap.protocols.file_systems import FileSystem, Fingerprint, Mounts, require_regular
from ckptmap.storage.resource_limits import unreadable
from ckptmap.storage.source_sums import SourceCheck, SourceSums
from ckptmap.tensors import StoredTensor

MAX_OPEN = 2048
OPEN_SHARE = 0.3
"""The most descriptors held at once: a number, and a share of the process's limit. Two `Files` and
the outputs fit in the limit. Every tensor is read from the files of all ranks: with fewer
descriptors, each tensor would open all files again."""

BATCH = 64
"""Files that `read_each` holds at once."""


class _Use:
    """A descriptor in use. A class: every read makes one, and a generator costs more."""

    __slots__ = ("_entry", "_lock")

    def __init__(self, entry: list[int], lock: threading.Lock) -> None:
        self._entry, self._lock = entry, lock

    def __enter__(self) -> int:
        return self._entry[0]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entry[1] -= 1


class Files:
    """An LRU of descriptors, safe to share between threads; a descriptor in use is never closed.

    max_open  descriptors held at most; 0: a share of the process's limit
    mounts    the file systems that give the bytes of placeholders; those that are passed are the
              caller's, its own (None) are closed with it
    seen      fingerprints from when headers were read; a file that has another one is refused when
              it is opened
    by_range  read parts of a placeholder's file alone; False: make a verified local copy first
    sums      compares what is read with the checksums that readers state; switched on for values,
              not for headers
    """

    def __init__(self, max_open: int = 0, mounts: Mounts | None = None) -> None:
        self.mounts = Mounts() if mounts is None else mounts
        self._owns_mounts = mounts is None
        self.by_range = True
        self.sums = SourceSums(self.mounts)
        self.seen: Mapping[str, Fingerprint] = {}
        self._max_open = max_open or _most_open()
        self._lock = threading.Lock()
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # file -> [fd, users]

    def descriptor(self, file: str) -> _Use:
        """Return a context manager that keeps the file open: `with files.descriptor(file) as fd:`."""
        if self.mounts:
            self._local(file)  # before the lock: other threads need it, and a download takes time
        with self._lock:
            entry = self._open.get(file)
            if entry is None:
                entry = self._open[file] = [self._open_file(file), 0]
            entry[1] += 1
            self._open.move_to_end(file)
            if len(self._open) > self._max_open:
                self._evict()
        return _Use(entry, self._lock)

    def forget(self, file: str) -> None:
        """Close the descriptor of a file, unless it is in use."""
        with self._lock:
            if file in self._open and not self._open[file][1]:
                os.close(self._open.pop(file)[0])

    def _remote(self, file: str) -> FileSystem | None:
        """Return the file system to read parts of a file from; None: read the local file or copy."""
        if not self.mounts or not self.by_range:
            return None
        mounted = self.mounts.file_system_of(file)
        return None if mounted is None or mounted.held(file) is not None else mounted

    def _local(self, file: str) -> Path:
        return self.mounts.local_copy(file)

    def _open_file(self, file: str) -> int:
        then = self.seen.get(file)
        try:
            if then is not None and Fingerprint.of(file, self.mounts) != then:
                raise RunError(
                    "CKM308",
                    f"{file}: was written anew since its headers were read",
                    "nothing was made of it; open the checkpoint again, or run the command again",
                )
            path = self._local(file) if self.mounts else file
            require_regular(path)
            if os.path.isdir(path):  # it would open, and fail at the first read
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise unreadable(file, error) from error

    def _evict(self) -> None:
        while len(self._open) > self._max_open:
            idle = next((file for file, entry in self._open.items() if entry[1] == 0), None)
            if idle is None:
                return
            os.close(self._open.pop(idle)[0])

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset` on. Raise as `read_into` does."""
        if self._remote(file) is not None:
            data = bytearray(nbytes)
            self.read_into(file, offset, [memoryview(data)])
            return bytes(data)
        with self.descriptor(file) as fd:
            try:
                read = os.pread(fd, nbytes, offset)
            except OSError:
                read = b""  # `read_into` below fails again, and says why
        if len(read) == nbytes:
            self.sums.saw(file, offset, [memoryview(read)], nbytes)
            return read
        buffer = bytearray(nbytes)
        self.read_into(file, offset, [memoryview(buffer)])
        return bytes(buffer)

    def read_runs(self, file: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return so many bytes from each of these offsets of a file. Raise as `read_into` does."""
        if self._remote(file) is None and not self.sums.is_on:
            with self.descriptor(file) as fd:
                try:
                    read = list(map(os.pread, repeat(fd), sizes, offsets))
                except OSError:
                    read = []  # `read` below fails again, and says why
            if sum(map(len, read)) == sum(sizes):  # none is longer than asked for
                return read
        return [self.read(file, *run) for run in zip(offsets, sizes, strict=True)]

    def read_into(
        self, file: str, offset: int, buffers: Sequence[memoryview], has_gaps: bool = False
    ) -> None:
        """Fill the buffers, one after the other, with the bytes of a file from `offset` on.

        has_gaps  some of them are cuts of `source_sums.GAP`, for bytes that nobody wants

        Raise SourceError CKM101 where the file cannot be read, RunError CKM308 where it is shorter,
        SourceError CKM105 where the bytes complete a record and its stated checksum is another.
        """
        nbytes = self.read_unchecked(file, offset, buffers)
        self.sums.saw(file, offset, buffers, nbytes, has_gaps)

    def read_unchecked(self, file: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers as `read_into` does, without comparing checksums. Return their bytes."""
        wanted = sum([buffer.nbytes for buffer in buffers])
        if not wanted:
            return 0
        remote = self._remote(file) if self.mounts else None
        if remote is not None:
            remote.read_into(file, offset, buffers)
            return wanted
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
        return wanted

    def settle_sums(self, whole: bool = False) -> SourceCheck:
        """Return what was compared with stated checksums; see `SourceSums.settle`."""
        return self.sums.settle(self.read_unchecked, self._is_local, whole)

    def settle_tensor(self, stored: StoredTensor) -> None:
        """Compare the records of a tensor that was read whole; see `SourceSums.settle_span`."""
        for _, region, _ in stored.chunks:
            if self._is_local(region.file):
                span = region.file, region.offset, region.span_nbytes
                self.sums.settle_span(self.read_unchecked, *span)

    def _is_local(self, file: str) -> bool:
        return self.mounts.file_system_of(file) is None

    def read_each(self, reads: Sequence[tuple[str, int, memoryview]]) -> None:
        """Do many reads, each (file, offset, buffer to fill), with a batch of files open at once."""
        batch = min(BATCH, self._max_open)
        for at in range(0, len(reads), batch):
            some = reads[at : at + batch]
            if not self.mounts:
                with self._descriptors([file for file, _, _ in some]) as fds:
                    if _all_read(fds, some):
                        for file, offset, place in some:
                            self.sums.saw(file, offset, [place], place.nbytes)
                        continue
            for file, offset, place in some:
                self.read_into(file, offset, [place])  # raises where it is too short

    @contextmanager
    def _descriptors(self, names: Sequence[str]) -> Iterator[list[int]]:
        """Keep several files open; their descriptors, in the order of `names`."""
        held: list[list[int]] = []
        try:
            with self._lock:
                for file in names:
                    entry = self._open.get(file)
                    if entry is None:
                        entry = self._open[file] = [self._open_file(file), 0]
                    entry[1] += 1
                    held.append(entry)
                    self._open.move_to_end(file)
                self._evict()
            yield [fd for fd, _ in held]
        finally:
            with self._lock:
                for entry in held:
                    entry[1] -= 1

    def close(self) -> None:
        """Close the descriptors; unmount the file systems that are mounted in its own mounts, and
        remove what they keep on the local disk."""
        with self._lock:
            for fd, _ in self._open.values():
                os.close(fd)
            self._open.clear()
        if self._owns_mounts:
            self.mounts.close()

    def __del__(self) -> None:
        for fd, users in self._open.values():  # no lock: no other thread has a reference
            if not users:
                os.close(fd)


@cache
def _most_open() -> int:
    """Return how many descriptors one `Files` holds, from the limit at its first call."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if limit == resource.RLIM_INFINITY else min(MAX_OPEN, int(limit * OPEN_SHARE))


def _all_read(fds: Sequence[int], reads: Sequence[tuple[str, int, memoryview]]) -> bool:
    """Fill each buffer with one call. Return False where one failed or read too few bytes."""
    try:
        return all(
            [
                os.preadv(fd, (place,), offset) == place.nbytes
                for fd, (_, offset, place) in zip(fds, reads, strict=True)
            ]
        )
    except OSError:
        return False


@contextmanager
def verified_copies(files: Files) -> Iterator[None]:
    """Read only whole local copies, whose hash was checked, inside the `with` block."""
    before, files.by_range = files.by_range, False
    try:
        yield
    finally:
        files.by_range = before


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the buffers that remain to be filled after the first `done` bytes."""
    rest = []
    for buffer in buffers:
        if done >= buffer.nbytes:
            done -= buffer.nbytes
        else:
            rest.append(buffer[done:])
            done = 0
    return rest
