"""Counts and sizes as text."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 file", "1,024 files"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def human(nbytes: int) -> str:
    """Return a number of bytes in binary units: 1536 -> "1.5 KiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
