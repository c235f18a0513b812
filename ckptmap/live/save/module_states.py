"""Extra state of modules in a save: that of the lowest rank that has the module, and what differs on others.

rank 0  {0._extra_state: a}              module_extra_state.0._extra_state                 a
rank 1  {0._extra_state: b,              module_extra_state_of_ranks.rank1.0._extra_state  b
         1._extra_state: c}              module_extra_state.1._extra_state                 c
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptmap.live.model import module_extra_state
from ckptmap.live.model.module_extra_state import KEY, NAMES, OF_RANKS
from ckptmap.live.save import extra_values
from ckptmap.tensors import Path

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Digested:
    """Digests of the states of a rank by key, which ranks compare, and one of all."""

    by_key: Mapping[str, str] = field(default_factory=dict)
    of_all: str = ""

    @classmethod
    def of(cls, states: Mapping[str, object]) -> Digested:
        """Raises ArgumentError CKM516 for a tensor that is not plain."""
        found = extra_values.digests(states)
        text = repr([*found.items()]).encode()
        return cls(found, hashlib.blake2b(text, digest_size=16).hexdigest() if found else "")


def of_model(model: torch.nn.Module) -> dict[str, object]:
    """Return the extra state of each module that has one, by plain key."""
    return {k: m.get_extra_state() for k, m in module_extra_state.getters(model).items()}


def settings(states: Mapping[str, object]) -> dict[str, object]:
    """Return the setting that says which modules of this rank have a state."""
    return {NAMES: [*states]} if states else {}


def places(rank: int, by_rank: Sequence[Mapping[str, str]]) -> dict[str, Path]:
    """Return where this rank saves each of its states; those that a lower rank saves are left out. `by_rank` has
    the digests of each rank's."""
    found: dict[str, Path] = {}
    for key, digest in by_rank[rank].items():
        first = next(number for number, theirs in enumerate(by_rank) if key in theirs)
        if first == rank:
            found[key] = ("extra", KEY, key)
        elif by_rank[first][key] != digest:
            found[key] = ("extra", OF_RANKS, f"rank{rank}", key)
    return found


def kept(by_rank: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """Return who saves which state, as texts that every rank finds alike."""
    return frozenset(
        ".".join(map(str, path))
        for rank in range(len(by_rank))
        for path in places(rank, by_rank).values()
    )
