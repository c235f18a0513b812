"""Findings that an open issue describes: counted, and told apart from new ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.torture.runner import Outcome


@dataclass(frozen=True)
class Open:
    """An open point, in its issue's words, and the findings that are of it: result and a pattern."""

    words: str
    result: str
    pattern: str

    def fits(self, outcome: Outcome) -> bool:
        told = f"{outcome.subject}: {outcome.label}: {outcome.text}"
        return outcome.result == self.result and re.search(self.pattern, told) is not None


KNOWN_OPEN: Sequence[Open] = ()
"""What closes a point takes its lines away here: then the torture finds it, should it come back."""
