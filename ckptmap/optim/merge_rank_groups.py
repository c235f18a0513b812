"""Merge parameter groups that differ between ranks: a pipeline stage has only its own parameters.

rank 0 [{"lr": 0.1, "params": ["a"]}], rank 1 [{"lr": 0.1, "params": ["b"]}]
    -> [{"lr": 0.1, "params": ["a", "b"]}]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptmap.core.state_paths import by_rank
from ckptmap.optim.state import GROUPS, NAMES, PARAMS
from ckptmap.tensors import Leaf, Path, PerRank


@dataclass(frozen=True)
class _MergedGroup:
    """The groups of one number on several ranks that have equal hyper-parameters.

    `params` are their parameters, each with its entry of `param_names`.
    """

    number: int
    settings: Mapping[str, object]
    is_named: bool
    params: dict[str, object] = field(default_factory=dict)

    def takes(self, number: int, group: Mapping[str, object]) -> bool:
        alike = (self.number, self.is_named) == (number, NAMES in group)
        return alike and self.settings == _settings(group)

    def group(self) -> dict[str, Any]:
        names = {NAMES: list(self.params.values())} if self.is_named else {}
        return {**self.settings, PARAMS: list(self.params), **names}


def merge_rank_groups(leaves: Mapping[Path, Leaf]) -> Mapping[Path, Leaf]:
    """Return the leaves with one list of groups in place of each rank's own, if groups list names."""
    leaf = leaves.get((GROUPS,))
    merged = _merge(leaf) if isinstance(leaf, PerRank) else None
    return leaves if merged is None else {**leaves, (GROUPS,): [group.group() for group in merged]}


def contradiction(leaves: Mapping[Path, Leaf]) -> str:
    """Return why groups that differ from rank to rank are not one optimizer's; "": none differ."""
    if any(path[0] == GROUPS and isinstance(leaf, PerRank) for path, leaf in leaves.items()):
        return (
            "its ranks have different param_groups that are keyed by index, or that set other"
            " hyper-parameters for one parameter"
        )
    return ""


def _merge(leaf: PerRank) -> list[_MergedGroup] | None:
    """Return the merged groups; None: they list no names, or ranks set one parameter differently."""
    merged: list[_MergedGroup] = []
    for number, group in _groups_of_ranks(leaf):
        if not isinstance(group, dict):
            return None
        params = group.get(PARAMS, group.get(NAMES))
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            return None
        group_to_join = next((other for other in merged if other.takes(number, group)), None)
        if group_to_join is None:
            group_to_join = _MergedGroup(number, _settings(group), NAMES in group)
            merged.append(group_to_join)
        group_to_join.params.update(zip(params, group.get(NAMES, params), strict=False))
    names = [name for other in merged for name in other.params]
    return merged if len(names) == len(set(names)) else None


def _groups_of_ranks(leaf: PerRank) -> Iterator[tuple[int, Leaf]]:
    """Yield (number, group) of every rank that has groups; (0, value) for a value that is no list."""
    for groups in by_rank(leaf):
        if isinstance(groups, list):
            yield from enumerate(groups)
        elif groups is not None:
            yield 0, groups


def _settings(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name not in (PARAMS, NAMES)}
