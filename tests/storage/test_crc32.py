"""CRC-32 with ISA-L and without it."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

import pytest

from ckptmap.storage.crc32 import combined, crc32, crc32_combine


def test_crc_is_that_of_zlib_with_and_without_isa_l() -> None:
    data = os.urandom(100_003)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[7:], crc32(data[:7])) == zlib.crc32(data)
    without = (
        "import sys, zlib; sys.modules['isal'] = None; "
        "from ckptmap.storage.crc32 import crc32; assert crc32 is zlib.crc32"
    )
    subprocess.run([sys.executable, "-c", without], check=True, timeout=60)


@pytest.mark.parametrize("cut", [0, 1, 7, 4096, 65_537, 100_003])
def test_two_crcs_are_combined_with_and_without_isa_l(cut: int) -> None:
    data = os.urandom(100_003)
    parts = zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut
    assert combined(*parts) == crc32_combine(*parts) == zlib.crc32(data)
