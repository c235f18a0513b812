"""Files that a mounted file system answers for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptmap.errors import SourceError
from ckptmap.storage.file_systems import MOUNTS, Fingerprint, Mounts
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
    assert MOUNTS.file_system_of("/bucket/w.bin") is None, "those of the process are others"
    with pytest.raises(SourceError, match=r"w\.bin: cannot be read"):
        Files().read("/bucket/w.bin", 0, 1)
    mounts.close()
    assert store.is_closed
    assert not mounts


def test_empty_mounts_are_not_those_of_the_process() -> None:
    MOUNTS.mount("/elsewhere", InMemory("/elsewhere/f", b"abc"))
    try:
        assert Fingerprint.of("/elsewhere/f").nbytes == 3
        with pytest.raises(FileNotFoundError, match="elsewhere"):
            Fingerprint.of("/elsewhere/f", Mounts())
    finally:
        MOUNTS.unmount("/elsewhere")
    assert not MOUNTS.file_system_of("/elsewhere/f")
