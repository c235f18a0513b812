"""The slots that a run has written, with digest and CRC-32: in arrays, for there may be millions."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import overload

from ckptmap.storage.journal import Written
from ckptmap.storage.source_sums import SourceCheck

_ROW = struct.Struct("<IIQI")
"""One slot in the report of a rank: file, slot, digest, CRC-32."""


class HexDigests(Sequence[str]):
    """The 64-bit digests of the slots of a file, as 16 hex digits each; "" if none were taken."""

    __slots__ = ("_taken", "values")

    def __init__(self, values: array[int], taken: bool = True) -> None:
        self.values, self._taken = values, taken

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> HexDigests: ...
    def __getitem__(self, index: int | slice) -> str | HexDigests:
        if isinstance(index, slice):
            return HexDigests(self.values[index], self._taken)
        return f"{self.values[index]:016x}" if self._taken else ""

    def __iter__(self) -> Iterator[str]:
        return map("%016x".__mod__, self.values) if self._taken else repeat("", len(self.values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HexDigests) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values.tobytes())


@dataclass(frozen=True)
class Executed:
    """What was written: `digests[file][slot]` (xxh3, 64 bit, hex; "" where none were asked for)
    and `crcs[file][slot]` (0 where the container stores none)."""

    digests: Sequence[Sequence[str]]
    crcs: Sequence[Sequence[int]]
    continued_nbytes: int
    """Bytes of an earlier run that were read back, found good, and kept."""
    source: SourceCheck = field(default_factory=SourceCheck)
    """What was compared with the checksums that the source states."""


class WrittenSlots:
    """The slots of each file that are written so far. Not locked: the caller holds a lock."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self.clear()

    def clear(self) -> None:
        self._digests = [array("Q", bytes(8 * n)) for n in self._counts]
        self._crcs = [array("I", bytes(4 * n)) for n in self._counts]
        self._done = [bytearray(n) for n in self._counts]

    def add(self, written: Sequence[Written]) -> None:
        if not written:
            return
        files, slots, digests, crcs = zip(*written, strict=True)
        file, first, stop = files[0], slots[0], slots[0] + len(slots)
        if files.count(file) < len(files) or slots != tuple(range(first, stop)):
            for one in written:
                self.add((one,))
            return
        numbers = map(int, digests, repeat(16)) if any(digests) else repeat(0, len(slots))
        self._digests[file][first:stop] = array("Q", numbers)
        self._crcs[file][first:stop] = array("I", crcs)
        self._done[file][first:stop] = b"\1" * len(slots)

    def report(self) -> bytes:
        """Return what is written as bytes, one row a slot, for `merge` on another rank."""
        return b"".join(
            _ROW.pack(file, slot, self._digests[file][slot], self._crcs[file][slot])
            for file, done in enumerate(self._done)
            for slot in range(len(done))
            if done[slot]
        )

    def merge(self, report: bytes) -> None:
        """Add what another rank reported."""
        for file, slot, digest, crc in _ROW.iter_unpack(report):
            assert not self._done[file][slot], f"slot {slot} of file {file}: written twice"
            self._digests[file][slot], self._crcs[file][slot] = digest, crc
            self._done[file][slot] = 1

    def result(self, digests: bool, continued_nbytes: int) -> Executed:
        """Return the result of the run, in which every slot must have been written."""
        missing = sum(done.count(0) for done in self._done)
        assert not missing, f"{missing} slots were not written: the plan does not cover them"
        hexes = tuple(HexDigests(values, digests) for values in self._digests)
        return Executed(hexes, tuple(self._crcs), continued_nbytes)
