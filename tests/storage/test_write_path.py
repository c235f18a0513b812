"""Which way bytes take to a file, and the CRC-32 of them."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from ckptmap.storage import write_path as ways
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.output_files import BUFFERED, Buffer, OutputFile, Stream, Sums
from ckptmap.storage.write_path import FAST, WINDOW, Fastest, Pace, Ways


def clock(monkeypatch: pytest.MonkeyPatch, times: Iterable[float]) -> None:
    """What the clock says, look by look."""
    left = iter(times)
    monkeypatch.setattr(ways.time, "monotonic", lambda: next(left))


def test_a_pace_is_that_of_the_last_whole_window(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    clock(monkeypatch, [10.0, 11.0, 20.0, 21.0, 30.0, 30.5])
    with pace.of(WINDOW // 2):
        pass
    assert pace.rate == 0.0, "half a window says nothing"
    with pace.of(WINDOW // 2):
        pass
    assert pace.rate == WINDOW / 2, "what lies between two writes does not count"
    with pace.of(WINDOW):
        pass
    assert pace.rate == WINDOW / 0.5


def test_writes_side_by_side_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    clock(monkeypatch, [10.0, 11.0, 12.0])  # the first begins, one ends, the other ends
    with pace.of(WINDOW // 2), pace.of(WINDOW // 2):
        pass
    assert pace.rate == WINDOW / 2


def test_the_disk_is_taken_where_memory_is_slow_and_it_is_not() -> None:
    assert Ways().past_cache
    fastest = Fastest()
    seen = []
    for fastest.cache.rate, fastest.disk.rate in (
        (0.0, 0.0), (FAST, 0.0), (FAST / 2, 0.0), (FAST / 2, FAST), (FAST / 2, FAST / 3),
    ):  # fmt: skip
        seen.append(fastest.past_cache)
    assert seen == [False, False, True, True, False]


def test_a_file_changes_its_way_and_keeps_its_bytes(tmp_path: Path) -> None:
    data = os.urandom(8 << 20)
    fastest = Fastest()
    output = OutputFile(tmp_path / "f", len(data), ways=fastest)
    if output._direct is None:
        pytest.skip("this filesystem refuses O_DIRECT")
    buffer, found = Buffer(1 << 20), []
    for at, fastest.cache.rate in ((0, 0.0), (3_000_001, FAST / 2), (6_000_000, FAST)):
        stream = Stream(output, at, buffer, Sums(wants_crc=False))
        found.append((output.is_direct, stream.wanted == BUFFERED))
        stream.append(memoryview(data)[at : {0: 3_000_001, 3_000_001: 6_000_000}.get(at)])
        stream.finish()
    output.close()
    assert found == [(False, True), (True, False), (False, True)]
    assert (tmp_path / "f").read_bytes() == data


def test_crc_is_that_of_zlib_with_and_without_isa_l() -> None:
    data = os.urandom(100_003)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[7:], crc32(data[:7])) == zlib.crc32(data)
    without = (
        "import sys, zlib; sys.modules['isal'] = None; "
        "from ckptmap.storage.crc32 import crc32; assert crc32 is zlib.crc32"
    )
    subprocess.run([sys.executable, "-c", without], check=True, timeout=60)
