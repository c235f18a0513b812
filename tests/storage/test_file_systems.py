"""Files that a mounted file system answers for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Fingerprint, Mounts, ReadsFiles, through
from ckptmap.storage.files import Files


class InMemory:
    """One file, of which parts can be read, and no copy is made."""

    origin = "mem://x"

    def __init__(self, file: str, data: bytes) -> None:
        self.file, self.data, self.is_closed = file, data, False

    def fingerprint(self, file: str) -> Fingerprint | None:
        return Fingerprint(len(self.data), 0, 0) if file == self.file else None

    def held(self, file: str) -> str | None:
        return None

    def fetch(self, file: str) -> str:
        raise SourceError("CKM101", f"{file}: is in memory", "read parts of it")

    def fetch_all(self, files: Sequence[str], into: Path | None) -> None:
        self.fetch(files[0])

    def discard(self, file: str) -> None:
        raise AssertionError

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:] = self.data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def close(self) -> None:
        self.is_closed = True


def test_files_read_what_is_mounted_in_the_mounts_that_they_are_given() -> None:
    mounts, store = Mounts(), InMemory("/bucket/w.bin", b"0123456789")
    assert not mounts
    mounts.mount("/bucket", store)
    assert Files(mounts=mounts).read("/bucket/w.bin", 3, 4) == b"3456"
    first, second = bytearray(2), bytearray(3)
    reads = [("/bucket/w.bin", 0, memoryview(first)), ("/bucket/w.bin", 7, memoryview(second))]
    Files(mounts=mounts).read_each(reads)
    assert (first, second) == (b"01", b"789")
    assert Fingerprint.of("/bucket/w.bin", mounts).nbytes == 10
    assert mounts.with_origins("/bucket/w.bin: bad") == "mem://x/w.bin: bad"
    with pytest.raises(SourceError, match=r"w\.bin: cannot be read"):
        Files().read("/bucket/w.bin", 0, 1)
    mounts.close()
    assert store.is_closed
    assert not mounts


def test_two_files_do_not_see_each_others_mounts() -> None:
    """Both have a placeholder of one name: each reads its own."""
    one, two, none = Files(), Files(), Files()
    one.mounts.mount("/bucket", InMemory("/bucket/f", b"abc"))
    two.mounts.mount("/bucket", InMemory("/bucket/f", b"defg"))
    assert one.read("/bucket/f", 0, 3) == b"abc"
    assert two.read("/bucket/f", 0, 4) == b"defg"
    assert Fingerprint.of("/bucket/f", one.mounts).nbytes == 3
    assert two.mounts.read_head("/bucket/f", 2) == b"de"
    with pytest.raises(FileNotFoundError, match="bucket"):
        Fingerprint.of("/bucket/f", none.mounts)


def test_files_close_the_mounts_that_they_made() -> None:
    store, files = InMemory("/bucket/f", b"abc"), Files()
    files.mounts.mount("/bucket", store)
    Files(mounts=files.mounts).close()
    assert files.mounts
    assert not store.is_closed, "those of another Files stay"
    files.close()
    assert not files.mounts
    assert store.is_closed


def test_an_adapter_reads_through_the_mounts_that_it_is_given() -> None:
    class Reads(ReadsFiles):
        def head(self) -> bytes:
            return self.mounts.read_head("/bucket/f", 3)

    class ReadsNone:
        """An adapter of the protocols alone."""

    mounts, adapter, plain = Mounts(), Reads(), ReadsNone()
    mounts.mount("/bucket", InMemory("/bucket/f", b"abc"))
    assert through(adapter, mounts).head() == b"abc"
    assert not adapter.mounts, "the registered one stays as it was"
    with pytest.raises(FileNotFoundError, match="bucket"):
        adapter.head()
    assert through(plain, mounts) is plain
