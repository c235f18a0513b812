"""CRC-32 with ISA-L and without it."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

from ckptmap.storage.crc32 import crc32


def test_crc_is_that_of_zlib_with_and_without_isa_l() -> None:
    data = os.urandom(100_003)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[7:], crc32(data[:7])) == zlib.crc32(data)
    without = (
        "import sys, zlib; sys.modules['isal'] = None; "
        "from ckptmap.storage.crc32 import crc32; assert crc32 is zlib.crc32"
    )
    subprocess.run([sys.executable, "-c", without], check=True, timeout=60)
