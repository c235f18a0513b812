"""CRC-32, as the members of a zip have it: by ISA-L where that is installed, ten times faster."""

from __future__ import annotations

__all__ = ["crc32"]

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32
