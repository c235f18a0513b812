"""Sizes in bytes, as a user types them: `64MiB`, `2GB`, `4096`."""

from __future__ import annotations

import re

import typer

UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
MIN_MEMORY = 2 << 20
"""Bytes of buffers that one thread holds whatever the bound. A bound below it could not be kept."""


def parse_nbytes(text: str) -> int:
    """Return bytes: `"64MiB"` -> 67108864, `"2GB"` -> 2000000000, `"4096"` -> 4096."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write for example 64MiB, 2GB or 4096")
    nbytes = int(float(match[1]) * UNITS[match[2]])
    if nbytes < 1:
        raise typer.BadParameter(f"{text!r}: expected 1 byte or more")
    return nbytes


def parse_memory(text: str) -> int:
    """Return the bytes of a bound for buffers, which is 2 MiB or more."""
    nbytes = parse_nbytes(text)
    if nbytes < MIN_MEMORY:
        raise typer.BadParameter(
            f"--max-memory {text}: expected 2MiB or more, what one thread holds"
        )
    return nbytes
