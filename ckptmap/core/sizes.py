"""Sizes in bytes, as people write them: `64MiB`, `2GB`, `4096`."""

from __future__ import annotations

import re
from typing import TypeAlias

Size: TypeAlias = int | str
"""Bytes, or text: `"64MiB"`."""

MIN_MEMORY = 2 << 20
"""Bytes of buffers that one thread of a conversion holds whatever the bound. A bound below it could not be kept."""

UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def parse_nbytes(text: str) -> int:
    """Return bytes: `"64MiB"` -> 67108864, `"2GB"` -> 2000000000, `"4096"` -> 4096.

    Raises ValueError where the text is no size, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{text!r} is no size; write for example 64MiB, 2GB or 4096")
    nbytes = int(float(match[1]) * UNITS[match[2]])
    if nbytes < 1:
        raise ValueError(f"{text!r}: expected 1 byte or more")
    return nbytes
