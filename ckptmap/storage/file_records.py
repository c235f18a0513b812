"""The records of one file: where they lie, what was read of each, and the error of a damaged one."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted
from ckptmap.core.printable import quote
from ckptmap.errors import SourceError
from ckptmap.storage.crc32 import crc32_combine
from ckptmap.storage.own_files import MANIFEST
from ckptmap.tensors import StatedSum, StoredTensor, Sum

if TYPE_CHECKING:
    from xxhash import xxh3_64

AGAIN = "copy the checkpoint again from where it was made"


class DamagedRecord(SourceError):
    """The bytes of a record do not have the checksum that the container states (CKM105)."""

    file = ""
    record = StatedSum(0, 0, None)

    @classmethod
    def at(cls, file: str, record: StatedSum, got: Sum) -> DamagedRecord:
        stated = f"{_kind(record.sum)} {_shown(record.sum)}, got {_shown(got)}"
        problem = "are damaged" if isinstance(record.sum, int) else "are not what ckptmap wrote"
        error = cls(
            "CKM105",
            f"{file}: bytes {record.offset} to {record.offset + record.nbytes} {problem}: "
            f"expected {stated}",
            AGAIN if isinstance(record.sum, int) else f"{without_manifest(file)}; else {AGAIN}",
        )
        error.file, error.record = file, record
        return error

    def naming(self, tensors: Iterable[tuple[str, StoredTensor]]) -> DamagedRecord:
        """Return the error with the names of those tensors that have bytes in the record."""
        offset, nbytes, _ = self.record
        names = {
            name
            for name, stored in tensors
            for _, region, _ in stored.chunks
            if region.file == self.file
            and region.offset < offset + nbytes
            and offset < region.offset + region.span_nbytes
        }
        if not names:
            return self
        more = f" (and {counted(len(names) - 1, 'more tensor')})" if len(names) > 1 else ""
        return DamagedRecord(self.code, f"{min(names)}{more}: {self.message}", self.hint)


FEW = 64
"""Up to this many new records, or this share of those that are known, are inserted one by one."""


MAX_STREAMS = 8
"""Readers of one xxh3 record at a time. What more of them read is counted, and read again."""


@dataclass(slots=True)
class RecordProgress:
    """What was read of one record that was not read in one piece."""

    start: int
    """Where the record begins in its file."""
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """Of a CRC-32: disjoint (start, end, CRC-32), in order; those that meet are joined."""
    streams: dict[int, xxh3_64] = field(default_factory=dict)
    """Of an xxh3, which can only be computed in order: end -> the digest of the bytes before it."""
    loose: int = 0
    """Bytes that were read and not summed."""

    @property
    def hashed(self) -> int:
        """The bytes from the start of the record on that a digest has."""
        return max(self.streams, default=self.start) - self.start

    @property
    def nbytes(self) -> int:
        return self.loose + self.hashed + sum(end - start for start, end, _ in self.parts)

    def stream_at(self, offset: int) -> xxh3_64 | None:
        """Take the digest of the bytes before `offset`, to go on with; None: there is none.

        Who has taken it puts it back into `streams`. A second reader of the same bytes meanwhile
        begins one of its own, or gets None.
        """
        from xxhash import xxh3_64

        if offset == self.start and len(self.streams) < MAX_STREAMS:
            return xxh3_64()
        return self.streams.pop(offset, None)

    def add(self, start: int, end: int, crc: int) -> None:
        """Add a part, and join it with those that it meets; one that overlaps another is loose."""
        parts = self.parts
        at = bisect_left(parts, (start, end, crc))
        if (at and parts[at - 1][1] > start) or (at < len(parts) and parts[at][0] < end):
            self.loose += end - start
            return
        if at < len(parts) and parts[at][0] == end:
            _, after, more = parts.pop(at)
            crc, end = crc32_combine(crc, more, after - end), after
        if at and parts[at - 1][1] == start:
            before, _, first = parts.pop(at - 1)
            crc, start = crc32_combine(first, crc, end - start), before
        insort(parts, (start, end, crc))


class FileRecords:
    """The records of one file, sorted by offset; no two overlap.

    good   offsets of the records that were read whole and compared
    begun  offset -> what was read of a record that was not read whole
    """

    def __init__(self, stated: Sequence[StatedSum]) -> None:
        self._stated = stated
        self._taken = 0
        self._records: list[StatedSum] = []
        self._offsets: list[int] = []
        self.good: set[int] = set()
        self.begun: dict[int, RecordProgress] = {}

    def take(self) -> None:
        """Take in what was stated since the last call. The first statement of a place counts."""
        fresh = self._stated[self._taken :]
        if not fresh:
            return
        self._taken += len(fresh)
        if len(fresh) <= max(FEW, len(self._records) // FEW):  # located between reads
            for record in fresh:
                self._insert(record)
            return
        end, kept = 0, []
        for record in sorted([*self._records, *fresh], key=_offset_of):
            if record.nbytes and record.offset >= end:
                kept.append(record)
                end = record.offset + record.nbytes
        self._records, self._offsets = kept, [record.offset for record in kept]

    def _insert(self, record: StatedSum) -> None:
        if record.nbytes and not self.near(record.offset, record.nbytes):
            at = bisect_left(self._offsets, record.offset)
            self._records.insert(at, record)
            self._offsets.insert(at, record.offset)

    def near(self, offset: int, nbytes: int) -> list[StatedSum]:
        """Return the records that share bytes with a run of the file."""
        first = bisect_right(self._offsets, offset) - 1
        if first < 0 or sum(self._records[first][:2]) <= offset:
            first += 1
        return self._records[first : bisect_left(self._offsets, offset + nbytes)]

    def at(self, offset: int) -> StatedSum | None:
        """Return the record that begins at this byte."""
        near = self.near(offset, 1)
        return near[0] if near and near[0].offset == offset else None

    def progress(self, record: StatedSum) -> RecordProgress:
        begun = self.begun.get(record.offset)
        if begun is None:
            begun = self.begun[record.offset] = RecordProgress(record.offset)
        return begun


def without_manifest(file: str) -> str:
    """Return what to do where a file below a manifest of ckptmap is not the one that it lists."""
    manifests = [str(folder / MANIFEST) for folder in Path(file).parents]
    manifest = next(filter(os.path.isfile, manifests), MANIFEST)
    return (
        "if another program wrote the file after ckptmap, the manifest is out of date:"
        f" rm {quote(manifest)}, and run the same again"
    )


def _offset_of(record: StatedSum) -> int:
    return record.offset


def _kind(stated: Sum) -> str:
    return "CRC-32" if isinstance(stated, int) else "xxh3"


def _shown(value: Sum) -> str:
    return f"{value:08x}" if isinstance(value, int) else str(value)
