"""Values of an optimizer that each rank has of its own, although ranks step the same parameters.

    a group's d                 Prodigy under FSDP: computed from the shards of the rank
    state[p]["adam_norm"]       LAMB under FSDP1: the norm of a shard, where the optimizer takes it for the parameter

    extra.ckptmap.own_values.rank1.groups.0.d            of the group of this number
    extra.ckptmap.own_values.rank1.state.<FQN>.adam_norm

Those of the lowest rank are in the usual places, too. A rank that holds the elements which it held takes its own; on
other ranks they mean nothing, so that a run cannot go on there bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptmap.core.state_paths import nest
from ckptmap.live.model import integer_keys
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.live.optimizer import rank_settings
from ckptmap.tensors import Path

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint
    from ckptmap.live.model.live_tensor import LiveTensor
    from ckptmap.live.optimizer.param_groups import StoredGroup

KEY = "ckptmap.own_values"
GROUPS, STATE = "groups", "state"


def place_in_group(rank: int, number: int, name: str) -> Path:
    """Return where a rank's own value of the group of this number is stored."""
    return ("extra", KEY, f"rank{rank}", GROUPS, str(number), name)


def place_in_state(rank: int, fqn: str, name: str) -> Path:
    """Return where a rank's own entry of a parameter's state is stored."""
    return ("extra", KEY, f"rank{rank}", STATE, fqn, name)


def group_title(number: int | str, name: str) -> str:
    """Return the name of a value of a group for the user."""
    return f"{name} of group {number}"


@dataclass(frozen=True)
class OwnValues:
    """Those of this rank: of groups by their number, of state by FQN; none where the rank holds other elements."""

    groups: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    state: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @classmethod
    def recorded(cls, checkpoint: Checkpoint, targets: Sequence[LiveTensor]) -> OwnValues:
        """Return what a checkpoint has for this rank."""
        values = {**checkpoint.plain, **checkpoint.other}
        own = {path[2:]: value for path, value in values.items() if path[:2] == _place()}
        if not own or not rank_settings.is_same_layout(checkpoint, targets):
            return cls()
        found: Mapping[str, Any] = nest(own)
        return cls(*(_of_dicts(found.get(kind)) for kind in (GROUPS, STATE)))

    def titles(self) -> set[str]:
        """Return the names of these values as a save records them."""
        return {
            *(group_title(number, name) for number, own in self.groups.items() for name in own),
            *(f"{fqn}.{name}" for fqn, own in self.state.items() for name in own),
        }

    def over(self, groups: Sequence[StoredGroup]) -> list[StoredGroup]:
        """Return the stored groups with the values of this rank."""
        return [
            {**group, **self.groups.get(str(number), {})} for number, group in enumerate(groups)
        ]


def _place() -> tuple[str, str]:
    return KEY, f"rank{rank_and_world()[0]}"


def _of_dicts(found: object) -> dict[str, Mapping[str, object]]:
    items = found.items() if isinstance(found, Mapping) else ()
    return {
        str(key): {str(name): value for name, value in integer_keys.restored(own).items()}
        for key, own in items
        if isinstance(own, Mapping)
    }
