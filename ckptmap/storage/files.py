"""Read-only access to source files: a bounded set of open descriptors, whole reads or an error.

All bytes of a source are read here, so that files may stand for others that are elsewhere: see
`Backing`.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from ckptmap.errors import RunError, SourceError
from ckptmap.storage.limits import short_of

MAX_OPEN = 2048
OPEN_SHARE = 0.3
"""Descriptors held at once: at most, and of what the process may have. Twice that, and the outputs,
fit. Every tensor is read from the files of all ranks, so fewer would open them anew for each."""

BATCH = 64
"""Files that `read_each` holds at once."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that a file is still the one that was planned on.

    Not the time of its last change of any kind (ctime): a hard link or a mode that a backup sets
    changes it, and neither a saved plan nor what a killed run wrote would then hold any more.
    """

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: str) -> Fingerprint:
        backing = backing_of(file)
        known = None if backing is None else backing.fingerprint(file)
        if known is not None:
            return known
        stat = os.stat(file)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Backing(Protocol):
    """Who knows the bytes of the placeholders below a directory: names and sizes are there, their
    content is not. All errors are SourceError or RunError."""

    origin: str
    """What the user calls the directory."""

    def fingerprint(self, file: str) -> Fingerprint | None:
        """What tells its content; None: it is no placeholder."""

    def held(self, file: str) -> str | None:
        """Where a whole, verified copy lies; None: there is none yet."""

    def fetch(self, file: str) -> str:
        """Have a whole, verified copy; its path."""

    def bring(self, files: Sequence[str], into: Path | None) -> None:
        """Have copies of all of them, `into` a directory of the caller's if given."""

    def drop(self, file: str) -> None:
        """A copy that was brought into the caller's directory is not needed any more."""

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Some bytes, without a whole copy."""

    def close(self) -> None:
        """Remove what it keeps on disk."""


_BACKINGS: dict[str, Backing] = {}


def back(directory: str, backing: Backing) -> None:
    """From now on `backing` answers for the files below `directory`, an absolute path."""
    global _BACKINGS  # replaced, not changed: other threads look through it
    _BACKINGS = {**_BACKINGS, directory.rstrip("/") + "/": backing}


def unback(directory: str) -> None:
    """Nobody answers for the files below `directory` any more."""
    global _BACKINGS
    root = directory.rstrip("/") + "/"
    _BACKINGS = {known: backing for known, backing in _BACKINGS.items() if known != root}


def let_go() -> None:
    """Nobody answers for any file any more, and what was kept for that is removed: for a process
    that ends without its exit handlers."""
    global _BACKINGS
    before, _BACKINGS = _BACKINGS, {}
    for backing in before.values():
        backing.close()


def has_backings() -> bool:
    """Does anybody answer for any file? Where not, nobody needs to be asked."""
    return bool(_BACKINGS)


def backing_of(file: str) -> Backing | None:
    """Who answers for a file; None: it is what it is."""
    for root, backing in _BACKINGS.items():
        if file.startswith(root):
            return backing
    return None


def whole(file: str | Path) -> Path:
    """Where all bytes of a file can be read: the file itself, or the copy of what it stands for.

    Raises RunError where they cannot be fetched. For small files that are read at once: index,
    config, manifest.
    """
    backing = backing_of(str(file))
    if backing is None or backing.fingerprint(str(file)) is None:
        return Path(file)
    return Path(backing.held(str(file)) or backing.fetch(str(file)))


def head(file: str | Path, nbytes: int) -> bytes:
    """The first bytes of a file, at most `nbytes`. Raises OSError, and as `Backing` does."""
    backing = backing_of(str(file))
    if backing is None or backing.fingerprint(str(file)) is None:
        with Path(file).open("rb") as stream:
            return stream.read(nbytes)
    first = bytearray(min(nbytes, Path(file).stat().st_size))
    if first:
        Files().read_into(str(file), 0, [memoryview(first)])
    return bytes(first)


def as_named(text: str) -> str:
    """A text with directories that stand for others named as the user names those."""
    for root, backing in _BACKINGS.items():
        text = text.replace(root, backing.origin + "/").replace(root[:-1], backing.origin)
    return text


class _Use:
    """A descriptor in use; a class, because there is one a read, and a generator costs more."""

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

    `max_open`: 0: as many as a share of the process's limit.

    `seen`: what files were when their headers were read; one that is not that any more is refused
    when it is opened.

    `by_range`: may bytes of a file that is elsewhere be read alone? Else it is fetched whole first.
    """

    def __init__(self, max_open: int = 0) -> None:
        self.by_range = True
        self.seen: Mapping[str, Fingerprint] = {}
        self._max_open = max_open or _most_open()
        self._lock = threading.Lock()
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # file -> [fd, users]

    def descriptor(self, file: str) -> _Use:
        """`with files.descriptor(file) as fd:` keeps it open inside."""
        if _BACKINGS:
            whole(file)  # which can take its time, and others want the lock
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
        """Close its descriptor, unless it is in use."""
        with self._lock:
            if file in self._open and not self._open[file][1]:
                os.close(self._open.pop(file)[0])

    def _elsewhere(self, file: str) -> Backing | None:
        """Who is to be asked for bytes of a file; None: they can be read."""
        if not _BACKINGS or not self.by_range:
            return None
        backing = backing_of(file)
        return None if backing is None or backing.held(file) is not None else backing

    def _open_file(self, file: str) -> int:
        then = self.seen.get(file)
        try:
            if then is not None and Fingerprint.of(file) != then:
                raise RunError(
                    "CKM308",
                    f"{file}: was written anew since its headers were read",
                    "nothing was made of it; open the checkpoint again, or run the command again",
                )
            return os.open(whole(file) if _BACKINGS else file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            failed = SourceError(
                "CKM101",
                f"{file}: cannot be read: {error.strerror}",
                "check the path and its permissions",
            )
            raise short_of(error, failed) from error

    def _evict(self) -> None:
        while len(self._open) > self._max_open:
            idle = next((file for file, entry in self._open.items() if entry[1] == 0), None)
            if idle is None:
                return
            os.close(self._open.pop(idle)[0])

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        if self._elsewhere(file) is not None:
            away = bytearray(nbytes)
            self.read_into(file, offset, [memoryview(away)])
            return bytes(away)
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
        wanted = sum([buffer.nbytes for buffer in buffers])
        if not wanted:
            return
        backing = self._elsewhere(file) if _BACKINGS else None
        if backing is not None:
            backing.read_into(file, offset, buffers)
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

    def read_each(self, reads: Sequence[tuple[str, int, memoryview]]) -> None:
        """`read_into` of many: (file, offset, what its bytes fill), a batch of files held at once."""
        batch = min(BATCH, self._max_open)
        for at in range(0, len(reads), batch):
            some = reads[at : at + batch]
            if not _BACKINGS:
                with self._descriptors([file for file, _, _ in some]) as fds:
                    if _all_read(fds, some):
                        continue
            for file, offset, place in some:
                self.read_into(file, offset, [place])  # or says what is wrong

    @contextmanager
    def _descriptors(self, names: Sequence[str]) -> Iterator[list[int]]:
        """Of several files at once."""
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
        with self._lock:
            for fd, _ in self._open.values():
                os.close(fd)
            self._open.clear()

    def __del__(self) -> None:
        for fd, users in self._open.values():  # no lock: nobody else is there any more
            if not users:
                os.close(fd)


@cache
def _most_open() -> int:
    """What the limit was when the first file was opened."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if limit == resource.RLIM_INFINITY else min(MAX_OPEN, int(limit * OPEN_SHARE))


def _all_read(fds: Sequence[int], reads: Sequence[tuple[str, int, memoryview]]) -> bool:
    """Did one call each bring all of it?"""
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
def verified(files: Files) -> Iterator[None]:
    """What is read inside comes from whole files whose hash was checked, not by range."""
    before, files.by_range = files.by_range, False
    try:
        yield
    finally:
        files.by_range = before


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
