"""Checksums that a container states for runs of bytes of its files."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Sum: TypeAlias = int | str | None
"""A CRC-32 as a number, an xxh3 of 64 bits as 16 hex digits; None: the writer left it out."""


class StatedSum(NamedTuple):
    """`nbytes` bytes from byte `offset` of a file on, and the checksum stated for exactly these.

    They are a member of a zip archive (CRC-32, PKWARE APPNOTE 6.3.10, section 4.4.7), or a chunk
    that a manifest of ckptmap lists (xxh3).
    """

    offset: int
    nbytes: int
    sum: Sum
