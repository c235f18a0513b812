"""Parse TOML that others may have written: bounded, and with one error for all that can be wrong.

Python's parser alone takes time that grows with the square of the names in a dotted key (80 kB of `a.a.a...`
take 15 s), and integers that other code then cannot print.
"""

from __future__ import annotations

import tomllib
from typing import Any

MAX_NBYTES = 4 << 20
"""Bytes of a file, and characters of a text: a mapping file has a few thousand, a plan that names each expert a million."""
MAX_STEPS = 20_000_000
"""Steps from one name of a key to the next, as counted below: a few seconds."""
MAX_BITS = 64
"""Bits of an integer. TOML promises no more."""
MAX_DEPTH = 100
"""Levels of arrays and tables."""


class TomlError(ValueError):
    """Text that ckptmap does not take as TOML: what is wrong, in one line. The caller adds the file's name."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document. Raises TomlError."""
    if len(text) > MAX_NBYTES:
        raise TomlError(f"{len(text):,} characters, expected at most {MAX_NBYTES:,}")
    if _steps(text) > MAX_STEPS:
        raise TomlError("a key or table of too many names with dots between them")
    try:
        document = tomllib.loads(text)
    except RecursionError as error:
        raise TomlError("arrays or tables are nested too deep") from error
    except ValueError as error:  # its own, and that of an integer of thousands of digits
        raise TomlError(str(error).partition(";")[0]) from error
    _check(document, 0)
    return document


def _steps(text: str) -> int:
    """Return a bound of the steps that the parser takes: each name of a key begins at the root again, by way
    of the table that it is in. A key lies on one line, so its dots are at most those of the line."""
    dots = [(line.count("."), line.lstrip()[:1] == "[") for line in text.split("\n")]
    table = max((count for count, is_header in dots if is_header), default=0)
    return sum((count + 1) * (count + table + 1) for count, _ in dots)


def _check(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TomlError(f"arrays or tables are nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check(item, depth + 1)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TomlError(f"an integer of {value.bit_length():,} bits, expected at most {MAX_BITS}")
