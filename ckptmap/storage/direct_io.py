"""Write output files: reserve their disk space first, then write large aligned blocks by O_DIRECT.

A buffer keeps bytes at an address that is congruent with their file offset modulo `ALIGN`. So the
aligned middle of a large write can go through an O_DIRECT descriptor, past the page cache. The
fragments before and after it, and all small writes, go through a second, buffered descriptor. A
page is written directly only if one write holds all of it, so no page is written through both
descriptors. Where O_DIRECT is refused (tmpfs, some network filesystems) all writes are buffered.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.core.formatting import human
from ckptmap.errors import DestinationError, RunError
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.own_files import odd_file, refusal
from ckptmap.storage.resource_limits import or_resource_error

if TYPE_CHECKING:
    from xxhash import xxh3_64

ALIGN = max(4096, mmap.PAGESIZE)
"""Bytes to which O_DIRECT offsets, lengths and addresses are aligned."""
DIRECT_MIN = 256 << 10
"""Below this many aligned bytes, a direct write costs more than a buffered one."""
BUFFERED = 256 << 10
"""Bytes of a stream that are written at once through the page cache: they fit in the L2 cache."""
MAX_OPEN = 64
"""Output files open at once, two descriptors each."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Buffer:
    """Page-aligned memory that holds up to `nbytes` consecutive bytes of a file at any offset."""

    __slots__ = ("_view", "nbytes")

    def __init__(self, nbytes: int, within: memoryview | None = None) -> None:
        self.nbytes = max(2 * ALIGN, -(-nbytes // ALIGN) * ALIGN)
        self._view = memoryview(mmap.mmap(-1, self.nbytes + ALIGN)) if within is None else within

    def parts(self, sizes: Sequence[int]) -> list[Buffer]:
        """Return a buffer for each size, inside this one, whose pages are in memory already.

        A buffer that does not fit has memory of its own.
        """
        parts, at = [], 0
        for nbytes in sizes:
            end = at + max(3 * ALIGN, -(-nbytes // ALIGN) * ALIGN + ALIGN)
            inside = end <= self._view.nbytes
            parts.append(Buffer(nbytes, self._view[at:end] if inside else None))
            at = end if inside else at
        return parts

    def at(self, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` of memory, at an address congruent with file `offset` modulo ALIGN."""
        assert nbytes <= self.nbytes
        return self._view[offset % ALIGN : offset % ALIGN + nbytes]


class Sums:
    """The running digest (xxh3, 64 bits) and CRC-32 of consecutive bytes; each can be turned
    off."""

    __slots__ = ("_digest", "_wants_crc", "crc32")

    def __init__(self, wants_crc: bool, wants_digest: bool = True) -> None:
        self._digest: xxh3_64 | None = None
        if wants_digest:
            from xxhash import xxh3_64

            self._digest = xxh3_64()
        self._wants_crc = wants_crc
        self.crc32 = 0

    def update(self, data: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(data)
        if self._wants_crc:
            self.crc32 = crc32(data, self.crc32)

    @property
    def digest(self) -> str:
        """Return the digest in hex; "" if digests are off."""
        return "" if self._digest is None else self._digest.hexdigest()


class OutputFile:
    """An output file that any threads write at any offsets. Its mode is 0666 less the umask.

    A file that exists is opened, and keeps its bytes. Raises DestinationError CKM304 if it cannot
    be created, CKM303 if there is no space for its `nbytes`, RunError CKM306 if a write fails.
    """

    def __init__(self, path: Path, nbytes: int, direct: bool = True) -> None:
        self.path = path
        self._declined = False
        # The kernel lets one thread at a time write to the page cache of a file. The others spin
        # there, so they wait for this lock instead.
        self._turn = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags, 0o666)
            problem = odd_file(os.fstat(self._fd))
        except OSError as error:
            failed = DestinationError(
                "CKM304",
                f"{path}: cannot be created: {error.strerror}",
                "choose a destination that can be written",
            )
            raise or_resource_error(error, failed) from error
        if problem:
            os.close(self._fd)
            raise refusal(path, problem)
        self._direct = _open_direct(path) if direct and nbytes >= DIRECT_MIN else None
        try:
            _reserve(self._fd, nbytes)
        except OSError as error:
            self.close()
            raise _reserve_error(path, nbytes, error) from error

    @property
    def is_direct(self) -> bool:
        """Return True if large writes bypass the page cache."""
        return self._direct is not None and not self._declined

    def write_at(self, offset: int, data: memoryview, direct: bool = True) -> None:
        """Write all of `data` at `offset`. Pass `direct=False` if other bytes are written over
        parts of it later."""
        head = -offset % ALIGN
        middle = (data.nbytes - head) // ALIGN * ALIGN
        direct = direct and self.is_direct and middle >= DIRECT_MIN
        if not direct or _address(data) % ALIGN != offset % ALIGN:
            self._write(offset, data)
            return
        self._write(offset, data[:head])
        done = self._write_direct(offset + head, data[head : head + middle])
        self._write(offset + head + done, data[head + done :])

    def _write_direct(self, offset: int, data: memoryview) -> int:
        """Write by O_DIRECT. Return the bytes written: fewer if the filesystem refuses it."""
        done = 0
        while done < data.nbytes and self._direct is not None and not self._declined:
            try:
                count = os.pwrite(self._direct, data[done:], offset + done)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    self._declined = True
                    break
                raise self._failed(error) from error
            done += count
            if count == 0 or count % ALIGN:
                break
        return done

    def _write(self, offset: int, data: memoryview) -> None:
        while data.nbytes:
            try:
                with self._turn:
                    count = os.pwrite(self._fd, data, offset)
            except OSError as error:
                raise self._failed(error) from error
            data, offset = data[count:], offset + count

    def _failed(self, error: OSError) -> RunError:
        failed = RunError(
            "CKM306",
            f"{self.path}: write failed: {error.strerror}",
            "free some space or mend the disk, then run the same command again to continue",
        )
        return or_resource_error(error, failed)

    def copy_from(self, source: int, at: int, offset: int, nbytes: int) -> int:
        """Copy bytes from byte `at` of another file to `offset`, inside the kernel.

        Some filesystems then share whole blocks. Returns the bytes copied; 0 if the kernel cannot
        copy between these two files.
        """
        copy = getattr(os, "copy_file_range", None)
        if copy is None:
            return 0
        try:
            return int(copy(source, self._fd, nbytes, at, offset))
        except OSError as error:
            if error.errno in NO_SPACE:
                raise self._failed(error) from error
            return 0

    def truncate(self, nbytes: int) -> None:
        """Set the final length of the file."""
        try:
            os.ftruncate(self._fd, nbytes)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)


class Outputs:
    """The files of one output directory: the space of all is reserved first, few are open at
    once."""

    def __init__(self, paths: Sequence[Path], nbytes: Sequence[int], direct: bool = True) -> None:
        self._paths, self._nbytes, self._direct = paths, nbytes, direct
        self._lock = threading.Lock()
        self._open: OrderedDict[int, tuple[OutputFile, list[int]]] = OrderedDict()
        for index, path in enumerate(paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            OutputFile(path, nbytes[index], direct=False).close()

    @contextmanager
    def file(self, index: int) -> Iterator[OutputFile]:
        """Keep file `index` open inside the `with` block; any number of threads may use it."""
        with self._lock:
            if index not in self._open:
                made = OutputFile(self._paths[index], self._nbytes[index], self._direct)
                self._open[index] = (made, [0])
            file, users = self._open[index]
            users[0] += 1
            self._open.move_to_end(index)
            self._evict()
        try:
            yield file
        finally:
            with self._lock:
                users[0] -= 1

    def _evict(self) -> None:
        if len(self._open) > MAX_OPEN:
            idle = [index for index, (_, users) in self._open.items() if users[0] == 0]
            for index in idle[: len(self._open) - MAX_OPEN]:
                self._open.pop(index)[0].close()

    def close(self) -> None:
        with self._lock:
            for file, _ in self._open.values():
                file.close()
            self._open.clear()


class Stream:
    """Writes consecutive bytes, from `offset` on, in large aligned blocks.

    The fragment after the last whole page of a block is kept for the next block, so that only the
    first and the last page of the stream can be written in two pieces.
    """

    __slots__ = ("_at", "_buffer", "_file", "_held", "sums", "wanted")

    def __init__(self, file: OutputFile, offset: int, buffer: Buffer, sums: Sums) -> None:
        self._file, self._buffer, self._at, self._held = file, buffer, offset, 0
        self.wanted = self.room if file.is_direct else min(BUFFERED, self.room)
        """The best number of bytes for one `take`; the stream collects as many before it writes."""
        self.sums = sums

    @property
    def position(self) -> int:
        """Return the file offset of the next byte."""
        return self._at + self._held

    @property
    def room(self) -> int:
        """Return the most bytes that `take` may be asked for."""
        return self._buffer.nbytes - ALIGN

    def take(self, nbytes: int) -> memoryview:
        """Return memory for the next `nbytes`. Fill it, then call `push` with it."""
        if self._held + nbytes > self._buffer.nbytes:
            self._flush()
        return self._buffer.at(self._at, self._held + nbytes)[self._held :]

    def push(self, data: memoryview) -> None:
        """Add the filled memory that `take` returned to the stream."""
        self.sums.update(data)
        self._held += data.nbytes
        if self._held >= self.wanted:
            self._flush()

    def append(self, data: memoryview) -> None:
        """Add a copy of `data`, of any length, to the stream."""
        while data.nbytes:
            place = self.take(min(data.nbytes, self.room))
            place[:] = data[: place.nbytes]
            self.push(place)
            data = data[place.nbytes :]

    def skip(self, nbytes: int) -> None:
        """Move the position by `nbytes` that are written already."""
        self.finish()
        self._at += nbytes

    def _flush(self) -> None:
        end = self._at + self._held
        whole = max(0, end // ALIGN * ALIGN - self._at)
        held = self._buffer.at(self._at, self._held)
        self._file.write_at(self._at, held[:whole])
        rest = bytes(held[whole:])
        self._at, self._held = self._at + whole, len(rest)
        self._buffer.at(self._at, len(rest))[:] = rest

    def finish(self) -> Sums:
        """Write the bytes that are still buffered. Return the current sums."""
        self._file.write_at(self._at, self._buffer.at(self._at, self._held))
        self._at, self._held = self._at + self._held, 0
        return self.sums


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _open_direct(path: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flag)
    except OSError:
        return None


def _reserve(fd: int, nbytes: int) -> None:
    """Make the file at least `nbytes` long, with disk blocks reserved if the filesystem can do
    that.

    It calls fallocate(2) itself, because the C library's posix_fallocate writes into every block on
    a filesystem that cannot reserve them.
    """
    if nbytes <= 0:
        return
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is not None:
        allocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        while allocate(fd, 0, 0, nbytes) != 0:
            number = ctypes.get_errno()
            if number in NO_SPACE:
                raise OSError(number, os.strerror(number))
            if number != errno.EINTR:
                break
        else:
            return
    if os.fstat(fd).st_size < nbytes:
        os.ftruncate(fd, nbytes)


def _reserve_error(path: Path, nbytes: int, error: OSError) -> DestinationError | RunError:
    if error.errno in NO_SPACE:
        full = DestinationError(
            "CKM303",
            f"{path}: needs {human(nbytes)}: {error.strerror}",
            "free some space or choose another destination",
        )
        return or_resource_error(error, full)
    return RunError("CKM306", f"{path}: cannot be made {human(nbytes)} long: {error.strerror}")
