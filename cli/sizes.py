"""Sizes in bytes as options of a command; a wrong one is a usage error."""

from __future__ import annotations

import typer

from ckptmap.core import sizes


def parse_nbytes(text: str) -> int:
    """Return bytes: `"64MiB"` -> 67108864, `"2GB"` -> 2000000000, `"4096"` -> 4096."""
    try:
        return sizes.parse_nbytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_memory(text: str) -> int:
    """Return the bytes of a bound for buffers, which is 2 MiB or more."""
    nbytes = parse_nbytes(text)
    if nbytes < sizes.MIN_MEMORY:
        raise typer.BadParameter(
            f"--max-memory {text}: expected 2MiB or more, what one thread holds"
        )
    return nbytes
