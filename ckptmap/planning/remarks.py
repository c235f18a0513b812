"""What a stage of planning reports beside its result: keys left out, keys in the way, and notes.

Each stage of `planner` returns its own `Remarks`; a plan holds their sum, in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptmap.core.printable import advised

OPTIONS_SHOWN = 4
"""Options that a hint lists one by one; keys of more in one dict are left out with the dict."""


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


def leave_behind(keys: Sequence[str]) -> str:
    """Return the hint with the options that leave out the keys.

    Of many the keys in one dict are left out by the dict, and with them what else is in it.

        hyper_parameters.a ... hyper_parameters.z    -> --drop hyper_parameters
    """
    if len(keys) <= OPTIONS_SHOWN:
        return f"leave them behind with {_options(keys)}"
    by_dict: dict[str, list[str]] = {}
    for key in keys:
        by_dict.setdefault(key.rpartition(".")[0], []).append(key)
    joint = {name: len(inside) for name, inside in by_dict.items() if name and len(inside) > 1}
    alone = [key for key in keys if key.rpartition(".")[0] not in joint]
    beside = f", and what lies beside {sum(joint.values())} of them," if joint else ""
    return f"leave them behind{beside} with {_options([*joint, *alone])}"


def _options(keys: Sequence[str]) -> str:
    return " ".join(advised(drop=key) for key in keys)
