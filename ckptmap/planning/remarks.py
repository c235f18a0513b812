"""What a stage of planning reports beside its result: keys left out, keys in the way, and notes.

Each stage of `planner` returns its own `Remarks`; a plan holds their sum, in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Unresolved:
    """A source key that the plan cannot account for."""

    key: str
    reason: str
    hint: str
    option: str = ""
    """The option that leaves the key behind; empty: no option does."""


@dataclass(frozen=True)
class Remarks:
    """What the user is told about a plan.

    dropped     source key -> why it is not in the output
    unresolved  source keys that must be dropped, named or converted otherwise before a run
    notes       sentences for the user
    """

    dropped: Mapping[str, str] = field(default_factory=dict)
    unresolved: Sequence[Unresolved] = ()
    notes: Sequence[str] = ()

    def __add__(self, other: Remarks) -> Remarks:
        """Return these remarks followed by the others."""
        return Remarks(
            {**self.dropped, **other.dropped},
            [*self.unresolved, *other.unresolved],
            [*self.notes, *other.notes],
        )
