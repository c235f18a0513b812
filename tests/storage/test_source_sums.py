"""Checksums of records, computed from reads of any size, in any order, by several threads."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.file_records import DamagedRecord
from ckptmap.storage.source_sums import GAP, SourceCheck, SourceSums
from ckptmap.tensors import StatedSum

FILE = "weights"


class Bytes:
    """A file in memory, read as `Files` reads: every read is shown to the sums."""

    def __init__(self, content: bytes, stated: Sequence[StatedSum]) -> None:
        self.content = content
        mounts = Mounts()
        mounts.state(FILE, stated)
        self.sums = SourceSums(mounts)
        self.sums.is_on = True

    def read_unchecked(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        assert file == FILE
        for buffer in buffers:
            buffer[:] = self.content[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def read(self, offset: int, *sizes: int) -> None:
        """Read into buffers of these sizes; a negative size is a gap between two wanted runs."""
        buffers = [GAP[:-n] if n < 0 else memoryview(bytearray(n)) for n in sizes]
        self.read_unchecked(FILE, offset, buffers)
        nbytes = sum(map(abs, sizes))
        self.sums.saw(FILE, offset, buffers, nbytes, any(n < 0 for n in sizes))

    def settle(self, whole: bool = False, local: bool = True) -> SourceCheck:
        return self.sums.settle(self.read_unchecked, lambda file: local, whole)


def crc_of(content: bytes, offset: int, nbytes: int) -> StatedSum:
    return StatedSum(offset, nbytes, zlib.crc32(content[offset : offset + nbytes]))


def xxh3_of(content: bytes, offset: int, nbytes: int) -> StatedSum:
    return StatedSum(offset, nbytes, xxhash.xxh3_64_hexdigest(content[offset : offset + nbytes]))


CONTENT = random.Random(0).randbytes(1000)
RECORDS = [(10, 100), (110, 1), (150, 300), (450, 550)]
COVERED = sum(nbytes for _, nbytes in RECORDS)


@given(
    cuts=st.lists(st.integers(1, 999), unique=True, max_size=30),
    seed=st.integers(0, 99),
    hashed=st.sets(st.integers(0, 3)),
    flip=st.integers(0, 999) | st.none(),
)
def test_reads_of_any_size_in_any_order_find_every_flip(
    cuts: list[int], seed: int, hashed: set[int], flip: int | None
) -> None:
    stated = [
        (xxh3_of if i in hashed else crc_of)(CONTENT, *record) for i, record in enumerate(RECORDS)
    ]
    content = bytearray(CONTENT)
    if flip is not None:
        content[flip] ^= 1 << seed % 8
    file = Bytes(bytes(content), stated)
    runs = list(zip([0, *sorted(cuts)], [*sorted(cuts), 1000], strict=True))
    random.Random(seed).shuffle(runs)
    damaged = flip is not None and any(a <= flip < a + n for a, n in RECORDS)

    def work() -> SourceCheck:
        for start, end in runs:
            file.read(start, end - start)
        return file.settle()

    if damaged:
        with pytest.raises(DamagedRecord, match=r"are (damaged|not what ckptmap wrote)"):
            work()
    else:
        assert work() == SourceCheck(checked=COVERED)


def test_threads_put_the_parts_of_one_record_together() -> None:
    content = random.Random(1).randbytes(1 << 20)
    file = Bytes(content, [crc_of(content, 0, len(content))])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: file.read(at, 4096), range(0, 1 << 20, 4096)))
    assert file.settle() == SourceCheck(checked=1 << 20)


def test_runs_with_gaps_between_them_are_read_once_more_at_the_end() -> None:
    file = Bytes(CONTENT, [crc_of(CONTENT, 0, 1000)])
    for column in range(0, 100, 10):  # ten columns of a matrix of ten rows, as ranks hold them
        file.read(column, *([10, -90] * 9), 10)
    assert file.sums.checked_nbytes == 0
    assert file.settle() == SourceCheck(checked=1000)


def test_a_part_of_a_record_is_unchecked_unless_the_rest_is_asked_for() -> None:
    content = CONTENT * 200
    file = Bytes(content, [crc_of(content, 0, len(content))])
    file.read(100, 50)
    assert file.settle() == SourceCheck(unchecked=50)
    assert file.settle(whole=True) == SourceCheck(checked=len(content))


def test_the_rest_is_read_where_little_of_a_record_is_missing() -> None:
    content = CONTENT * 200
    file = Bytes(content, [crc_of(content, 0, len(content))])
    file.read(1000, 60_000)
    file.read(100_000, 60_000)
    assert file.settle() == SourceCheck(checked=len(content))


def test_nothing_remote_is_read_twice() -> None:
    file = Bytes(CONTENT, [xxh3_of(CONTENT, 0, 1000)])
    file.read(500, 500)
    file.read(0, 500)
    assert file.settle(local=False) == SourceCheck(unchecked=1000)
    assert file.settle() == SourceCheck(checked=1000)


def test_ranks_join_what_each_has_read() -> None:
    ranks = [Bytes(CONTENT, [crc_of(CONTENT, 0, 1000)]) for _ in range(4)]
    for rank, file in enumerate(ranks):
        file.read(250 * rank, 250)
    for file in ranks[1:]:
        ranks[0].sums.absorb(file.sums.begun())
    assert ranks[0].settle() == SourceCheck(checked=1000)


def test_ranks_find_the_damage_that_another_has_read() -> None:
    damaged = CONTENT[:700] + bytes([CONTENT[700] ^ 8]) + CONTENT[701:]
    good, bad = (Bytes(content, [crc_of(CONTENT, 0, 1000)]) for content in (CONTENT, damaged))
    good.read(0, 500)
    bad.read(500, 500)
    with pytest.raises(DamagedRecord, match="bytes 0 to 1000 are damaged: expected CRC-32"):
        good.sums.absorb(bad.sums.begun())


def test_a_second_read_is_compared_again() -> None:
    file = Bytes(CONTENT, [crc_of(CONTENT, 0, 1000)])
    file.read(0, 1000)
    file.content = bytes(1000)
    with pytest.raises(DamagedRecord):
        file.read(0, 1000)


def test_the_records_of_a_run_are_read_again_where_an_earlier_run_read_them() -> None:
    file = Bytes(CONTENT, [crc_of(CONTENT, *record) for record in RECORDS])
    file.read(10, 100)
    file.sums.read_again(FILE, 111, 60)
    assert file.settle() == SourceCheck(checked=400)


def test_records_without_a_checksum_are_told() -> None:
    file = Bytes(CONTENT, [StatedSum(0, 100, None), crc_of(CONTENT, 100, 900)])
    file.read(0, 1000)
    assert file.settle() == SourceCheck(checked=900, unstated=100)


def test_off_compares_nothing() -> None:
    file = Bytes(bytes(1000), [crc_of(CONTENT, 0, 1000)])
    file.sums.is_on = False
    file.read(0, 1000)
    assert not file.sums.states(FILE, 0, 1000)
    file.sums.is_on = True
    assert file.sums.states(FILE, 999, 1)
    with pytest.raises(DamagedRecord):
        file.read(0, 1000)
