"""Check the checksums that a container states for its records, while the bytes are read.

A record is a run of bytes of a file with a checksum over exactly these bytes: see `StatedSum`.
Readers state the records that they locate. `Files` shows every byte that it reads:

    files.mounts.state(file, [(offset, nbytes, 0x1c291ca3), ...])   a reader, from a directory
    sums.saw(file, offset, buffers, nbytes)                         Files, after each read
    sums.settle(read)                                               who must know: at the end

A record that is read whole is compared at once. Parts of a record may be read in any order, and by
several threads: the CRC-32s of parts that meet are combined. An xxh3 goes on where parts are read in
order. Parts that are read out of order, or with gaps between them, are counted; `settle` reads such
a record once more. It reads the rest of a record, too, where little is missing: the padding of a
shard, for one.

The digests in a manifest of ckptmap count as stated. It is read when the first value is: whoever
opens a checkpoint to look at its headers does not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.file_records import DamagedRecord, FileRecords, RecordProgress
from ckptmap.storage.manifest_file import state_chunks
from ckptmap.storage.record_sums import Read, crc32_of, cut, read_sum, xxh3_of
from ckptmap.tensors import StatedSum

Begun: TypeAlias = Mapping[str, Sequence[tuple[int, Sequence[tuple[int, int, int]], int]]]
"""Records that were read in part, by file: (offset, [(start, end, CRC-32), ...] of the parts, bytes
that were read and not summed)."""

GAP = memoryview(bytearray(16 << 10))
"""Bytes between two wanted runs are read into cuts of this buffer, and dropped."""
LITTLE_NBYTES = 64 << 10
"""Up to this many missing bytes of a record are always read."""
MAX_PARTS = 1000
"""Parts of one record that a rank tells the others of."""


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """What was compared, in bytes of the records that were read.

    checked    their checksum was computed, and is the stated one
    unchecked  bytes read of records that were not read whole
    unstated   bytes of records for which the container states no checksum
    """

    checked: int = 0
    unchecked: int = 0
    unstated: int = 0

    def __add__(self, other: SourceCheck) -> SourceCheck:
        return SourceCheck(
            self.checked + other.checked,
            self.unchecked + other.unchecked,
            self.unstated + other.unstated,
        )


class SourceSums:
    """The records that readers have stated, and which of them were read and compared.

    Safe to share between threads. Raises `DamagedRecord` from the call that completes a record.
    """

    def __init__(self, mounts: Mounts) -> None:
        self.is_on = False
        self._mounts = mounts
        self._stated: Mapping[str, Sequence[StatedSum]] = mounts.stated
        self._files: dict[str, FileRecords] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forget what was read so far: a run that begins answers for what it reads itself."""
        with self._lock:
            self._files.clear()

    def take_manifests(self) -> None:
        """Let the digests in the manifests beside opened checkpoints count as stated.

        Raise SourceError CKM403 where one is damaged, CKM105 where a header is not the one that it
        lists, CKM101 where one of them cannot be read.
        """
        with self._lock:
            manifests = self._mounts.manifests
            while manifests:
                state_chunks(manifests[0], self._mounts)
                del manifests[0]  # not before: a damaged one is refused each time

    def states(self, file: str, offset: int, nbytes: int) -> bool:
        """Return whether a checksum is stated for a record that shares bytes with a run."""
        _, near = self._near(file, offset, nbytes)
        return any(record.sum is not None for record in near)

    def _of(self, file: str) -> FileRecords | None:
        """Return the records of a file; None: it states none, or nothing is compared. Not locked."""
        stated = self._stated.get(file) if self.is_on else None
        if stated is None:
            return None
        held = self._files.get(file)
        if held is None:
            held = self._files[file] = FileRecords(stated)
        held.take()
        return held

    def _near(
        self, file: str, offset: int, nbytes: int
    ) -> tuple[FileRecords | None, Sequence[StatedSum]]:
        if self.is_on and self._mounts.manifests:
            self.take_manifests()
        with self._lock:
            held = self._of(file)
            return held, () if held is None else held.near(offset, nbytes)

    @property
    def has_ordered(self) -> bool:
        """Return whether digests of some file are compared that must be computed from the start to the end."""
        if not self.is_on:
            return False
        ends = (records[end] for records in self._stated.values() if records for end in (0, -1))
        return any(isinstance(record.sum, str) for record in ends)

    def needs_order(self, file: str, offset: int, nbytes: int) -> bool:
        """Return whether a run must be read from its start to its end, by one reader: a digest of these bytes is
        compared that can only be computed so."""
        if not self.is_on:
            return False
        _, near = self._near(file, offset, nbytes)
        return any(isinstance(record.sum, str) for record in near)

    def saw(
        self,
        file: str,
        offset: int,
        buffers: Sequence[memoryview],
        nbytes: int,
        has_gaps: bool = False,
    ) -> None:
        """Take note of `nbytes` that were read into consecutive buffers from `offset` on.

        has_gaps  some of the buffers are cuts of GAP
        """
        if not self.is_on or not (file in self._stated or self._mounts.manifests):
            return
        held, near = self._near(file, offset, nbytes)
        if held is None or not near:
            return
        run = _Reads(self, file, held)
        if len(near) == 1:
            run.one(near[0], offset, buffers, nbytes, has_gaps)
        else:
            run.several(near, offset, buffers)

    def compare(self, file: str, held: FileRecords, record: StatedSum, got: int | str) -> None:
        """Compare the checksum of a whole record. Raise DamagedRecord."""
        if got != record.sum:
            raise DamagedRecord.at(file, record, got)
        with self._lock:
            held.good.add(record.offset)
            held.begun.pop(record.offset, None)

    def join(
        self, file: str, held: FileRecords, record: StatedSum, part: tuple[int, int, int]
    ) -> None:
        """Add a part (start, end, CRC-32) of a record; compare the record that it completes."""
        low, high, crc = part
        if high - low < record.nbytes:
            with self._lock:
                progress = held.progress(record)
                progress.add(low, high, crc)
                low, high, crc = progress.parts[0]
            if high - low < record.nbytes:
                return
        self.compare(file, held, record, crc)

    def go_on(
        self,
        file: str,
        held: FileRecords,
        record: StatedSum,
        low: int,
        buffers: Sequence[memoryview],
    ) -> None:
        """Go on with the xxh3 of a record, where the bytes before `low` were read; else count."""
        with self._lock:
            progress = held.progress(record)
            digest = progress.stream_at(low)
        high = low + sum([buffer.nbytes for buffer in buffers])
        if digest is None:
            self.count(held, record, high - low)
            return
        for buffer in buffers:
            digest.update(buffer)
        if high - record.offset == record.nbytes:
            self.compare(file, held, record, digest.hexdigest())
            return
        with self._lock:
            progress.streams[high] = digest

    def count(self, held: FileRecords, record: StatedSum, nbytes: int) -> None:
        """Count bytes of a record that were read and not summed."""
        with self._lock:
            held.progress(record).loose += nbytes

    # ------------------------------------------------------------------ the end of a run

    def settle(
        self, read: Read, is_local: Callable[[str], bool], whole: bool = False
    ) -> SourceCheck:
        """Return what was compared, after reading once more what was read whole in small parts.

        read       reads bytes without showing them to `saw`
        whole      also read the rest of records of which a part was read
        is_local   whether a file can be read again at no cost; records of others stay unchecked

        Raise DamagedRecord, and what `read` raises.
        """
        unchecked = unstated = 0
        for file, held in list(self._files.items()):
            for offset, progress in list(held.begun.items()):
                record = held.at(offset)
                if record is None or offset in held.good:  # read whole before, and again in part
                    continue
                if record.sum is None:
                    unstated += min(progress.nbytes, record.nbytes)
                elif whole or (is_local(file) and _is_little(record.nbytes, progress.nbytes)):
                    self._complete(read, file, held, record)
                else:
                    unchecked += min(progress.nbytes, record.nbytes)
        return SourceCheck(self.checked_nbytes, unchecked, unstated)

    def settle_span(self, read: Read, file: str, offset: int, nbytes: int) -> None:
        """Compare the records that a tensor in this span is all of, if they were read in parts.

        Raise DamagedRecord, and what `read` raises.
        """
        held, near = self._near(file, offset, nbytes)
        for record in near:
            assert held is not None
            progress = held.begun.get(record.offset)
            if progress is None or record.sum is None or record.offset in held.good:
                continue
            if progress.nbytes + LITTLE_NBYTES >= record.nbytes:
                self.compare(file, held, record, read_sum(read, file, record))

    def _complete(self, read: Read, file: str, held: FileRecords, record: StatedSum) -> None:
        """Read what is missing of a record: its gaps, or all of it where parts have no CRC-32."""
        progress = held.progress(record)
        if isinstance(record.sum, str) or progress.loose:
            self.compare(file, held, record, read_sum(read, file, record))
            return
        end = record.offset + record.nbytes
        lows = [record.offset, *(high for _, high, _ in progress.parts)]
        highs = [*(low for low, _, _ in progress.parts), end]
        for low, high in zip(lows, highs, strict=True):
            if low < high:
                crc = read_sum(read, file, StatedSum(low, high - low, record.sum))
                assert isinstance(crc, int), "parts are joined of CRC-32s only"
                self.join(file, held, record, (low, high, crc))

    def read_again(self, file: str, offset: int, nbytes: int) -> None:
        """Let `settle` read the records in this run of a file whole, unless they were compared."""
        held, near = self._near(file, offset, nbytes)
        for record in near:
            assert held is not None
            if record.offset not in held.good:
                progress = held.progress(record)
                progress.loose = max(progress.loose, record.nbytes)

    # ------------------------------------------------------------------ several ranks

    @property
    def checked_nbytes(self) -> int:
        """Bytes of the records that were compared."""
        held = list(self._files.values())
        good = (one.at(offset) for one in held for offset in one.good)
        return sum(record.nbytes for record in good if record is not None)

    def begun(self) -> Begun:
        """Return the records that were read in part, as `absorb` takes them."""
        return {
            file: [_told(offset, progress) for offset, progress in held.begun.items()]
            for file, held in self._files.items()
            if held.begun
        }

    def absorb(self, begun: Begun) -> None:
        """Add what another rank has read of its records. Raise DamagedRecord."""
        for file, records in begun.items():
            for offset, parts, loose in records:
                held, near = self._near(file, offset, 1)
                if held is None or not near or offset in held.good:
                    continue
                if loose:
                    self.count(held, near[0], loose)
                for low, high, crc in parts:
                    if offset not in held.good:
                        self.join(file, held, near[0], (low, high, crc))


@dataclass(frozen=True, slots=True)
class _Reads:
    """What one read brought of the records of one file."""

    sums: SourceSums
    file: str
    held: FileRecords

    def one(
        self,
        record: StatedSum,
        offset: int,
        buffers: Sequence[memoryview],
        nbytes: int,
        has_gaps: bool,
    ) -> None:
        """Note bytes of one record. Runs with gaps between them are small: they are only counted.

        Columns that a rank holds are a thousand buffers a call: no loop here looks at each of them.
        """
        end = record.offset + record.nbytes
        low, high = max(offset, record.offset), min(offset + nbytes, end)
        if high - low < nbytes:
            buffers = list(cut(buffers, low - offset, high - offset))
        if has_gaps:
            wanted = sum([part.nbytes for part in buffers if part.obj is not GAP.obj])
            self.sums.count(self.held, record, wanted)
        elif record.sum is None:
            self.sums.count(self.held, record, high - low)
        elif isinstance(record.sum, int):
            self.sums.join(self.file, self.held, record, (low, high, crc32_of(buffers, high - low)))
        elif high - low == record.nbytes:
            self.sums.compare(self.file, self.held, record, xxh3_of(buffers))
        else:
            self.sums.go_on(self.file, self.held, record, low, buffers)

    def several(
        self, records: Sequence[StatedSum], offset: int, buffers: Sequence[memoryview]
    ) -> None:
        """Note bytes of several records, mostly one whole record a buffer."""
        at, index = offset, 0
        for buffer in buffers:
            end = at + buffer.nbytes
            while buffer.obj is not GAP.obj and index < len(records):
                start, nbytes, stated = record = records[index]
                if start >= end:
                    break
                if start == at and start + nbytes == end and type(stated) is int:
                    self.sums.compare(self.file, self.held, record, crc32(buffer))
                elif start + nbytes > at:
                    self.one(record, at, [buffer], buffer.nbytes, False)
                if start + nbytes > end:
                    break
                index += 1
            at = end


def _told(offset: int, progress: RecordProgress) -> tuple[int, Sequence[tuple[int, int, int]], int]:
    """Return what another rank is told of a record; many small parts are only counted."""
    if len(progress.parts) > MAX_PARTS:
        return offset, (), progress.nbytes
    return offset, progress.parts, progress.loose + progress.hashed


def _is_little(nbytes: int, seen: int) -> bool:
    """Return whether the rest of a record of `nbytes` costs little beside the `seen` bytes."""
    return nbytes - seen <= max(seen, LITTLE_NBYTES)
