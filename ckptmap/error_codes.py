"""The explanations of all error codes, read from `error_codes.toml` beside this file.

Only `ckptmap explain` imports this module: an error itself carries its code, its message and its hint.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CODES", "Code"]


@dataclass(frozen=True)
class Code:
    """The explanation of one error code: what it means, how it comes about, and what to do."""

    title: str
    why: str
    next_step: str


def _read(file: Path) -> dict[str, Code]:
    """Return the explanations of a TOML file by code; line breaks in its texts become spaces."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return {
        code: Code(**{field: " ".join(text.split()) for field, text in table.items()})
        for code, table in tables.items()
    }


CODES: Mapping[str, Code] = _read(Path(__file__).with_suffix(".toml"))
"""The explanation of every code that ckptmap raises, in the order of the codes."""
