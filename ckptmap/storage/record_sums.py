"""Compute the checksum of a record: of consecutive buffers, or of what is read from its file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from ckptmap.storage.crc32 import crc32
from ckptmap.tensors import StatedSum

SMALL_NBYTES = 4 << 10
"""Buffers that are smaller on average are joined before their CRC-32 is computed."""
JOINED_NBYTES = 64 << 10
"""About as many bytes are joined at once: from 128 KiB on, malloc would take new pages each time."""
READ_NBYTES = 4 << 20
"""Bytes that are read at once to compute a checksum."""

Read: TypeAlias = Callable[[str, int, Sequence[memoryview]], object]
"""Fills buffers with the bytes of a file from an offset on."""


def cut(buffers: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Yield what lies between two bytes of consecutive buffers."""
    at = 0
    for buffer in buffers:
        low, high = max(at, start), min(at + buffer.nbytes, stop)
        if low < high:
            yield buffer[low - at : high - at]
        at += buffer.nbytes


def crc32_of(buffers: Sequence[memoryview], nbytes: int) -> int:
    """Return the CRC-32 of consecutive buffers, `nbytes` in all."""
    if len(buffers) == 1:
        return crc32(buffers[0])
    crc = 0
    if 0 < nbytes < SMALL_NBYTES * len(buffers):  # a call for each costs more than a copy of all
        some = max(1, JOINED_NBYTES * len(buffers) // nbytes)
        for at in range(0, len(buffers), some):
            crc = crc32(b"".join(buffers[at : at + some]), crc)
        return crc
    for buffer in buffers:
        crc = crc32(buffer, crc)
    return crc


def read_sum(read: Read, file: str, record: StatedSum) -> int | str:
    """Return the checksum of a record's bytes, of the kind that is stated."""
    buffer = memoryview(bytearray(min(READ_NBYTES, record.nbytes)))

    def blocks() -> Iterator[memoryview]:
        for at in range(0, record.nbytes, buffer.nbytes):
            block = buffer[: min(buffer.nbytes, record.nbytes - at)]
            read(file, record.offset + at, [block])
            yield block

    if isinstance(record.sum, str):
        return xxh3_of(blocks())
    crc = 0
    for block in blocks():
        crc = crc32(block, crc)
    return crc


def xxh3_of(parts: Iterable[memoryview]) -> str:
    from xxhash import xxh3_64

    hasher = xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
