"""How much of the package its annotations leave open: `Any` switches the type checker off."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

MOST_IN_1000_LINES = 8
"""`Any` stays where a type cannot say what a value is: a class attribute of a library without
annotations, keywords that are passed on to a dataclass, the boundary to a pickle or to JSON."""


def test_few_annotations_are_any() -> None:
    texts = [
        file.read_text() for room in ("ckptmap", "cli") for file in (ROOT / room).rglob("*.py")
    ]
    lines = sum(text.count("\n") for text in texts)
    uses = sum(len(re.findall(r"\bAny\b", text)) for text in texts)
    in_1000_lines = 1000 * uses / lines
    assert lines > 40_000
    if in_1000_lines >= MOST_IN_1000_LINES:
        pytest.fail(
            f"`Any` stands {uses} times in {lines} lines, {in_1000_lines:.1f} in 1,000, expected below"
            f" {MOST_IN_1000_LINES}. Write `object` for a value that is only passed on or tested by"
            " isinstance, `Leaf` for a value of a checkpoint, a Protocol for the attributes that"
            " are used, a TypeVar for what is returned as it came, and torch's own classes under"
            " TYPE_CHECKING."
        )
