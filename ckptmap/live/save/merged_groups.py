"""The parameter groups of all ranks as one list.

Ranks that hold the same parameters have the same groups: those of rank 0 are stored. Where each has other parameters,
as stages of a pipeline and experts have, groups of equal hyper-parameters are one group of the whole model:

    rank 0  [{lr: 1, params: [a]}]                             {lr: 1, params: [a, b]}    numbers of rank 0: [0]
    rank 1  [{lr: 1, params: [b]}, {lr: 2, params: [c]}]  ->   {lr: 2, params: [c]}       numbers of rank 1: [0, 1]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptmap.live.optimizer import own_values
from ckptmap.live.optimizer.local_state import HeldGroup
from ckptmap.live.save.extra_values import digests
from ckptmap.tensors import Path

Mark = tuple[str, Mapping[str, str]]
"""The class of an optimizer, and digests of the hyper-parameters of a group by name."""


def told(groups: Sequence[HeldGroup]) -> str:
    """Return a digest of which parameters are in which group, by which ranks see that all have the same groups."""
    digest = hashlib.blake2b(digest_size=16)
    for group in groups:
        digest.update(repr((group.part, group.at, group.params)).encode())
    return digest.hexdigest()


@dataclass
class MergedGroups:
    """The groups that are stored.

    numbers  for the groups of each rank the number of the stored one; empty: all ranks have those of rank 0
    unlike   by the number of a stored group, names of values that differ between ranks for the same parameters
    of_rank  for each rank its group of a stored one's number
    """

    groups: list[dict[str, object]] = field(default_factory=list)
    numbers: list[list[int]] = field(default_factory=list)
    unlike: dict[int, dict[str, None]] = field(default_factory=dict)
    of_rank: list[dict[int, HeldGroup]] = field(default_factory=list)

    def own(self) -> Iterator[tuple[Path, object]]:
        """Yield what ranks have of their own, with the place where it is stored."""
        for rank, groups in enumerate(self.of_rank):
            for number, names in self.unlike.items():
                values = groups[number].values if number in groups else {}
                for name in names.keys() & values.keys():
                    yield own_values.place_in_group(rank, number, name), values[name]

    def titles(self) -> list[str]:
        """Return the names of what differs, for the user."""
        return [
            own_values.group_title(n, name) for n, names in self.unlike.items() for name in names
        ]

    def _add(self, group: HeldGroup) -> int:
        self.groups.append({**group.values, "params": [*group.params]})
        return len(self.groups) - 1

    def _compare(self, number: int, one: Mark, other: Mark) -> None:
        (_, values), (_, others) = one, other
        names = [name for name in {**values, **others} if values.get(name) != others.get(name)]
        if names:
            self.unlike.setdefault(number, {}).update(dict.fromkeys(names))


def of_same_params(by_rank: Sequence[Sequence[HeldGroup]]) -> MergedGroups:
    """Return the groups of rank 0, where all ranks have the same; only rank 0's need to name their parameters."""
    merged = MergedGroups()
    for group in by_rank[0]:
        merged._add(group)
    marks = [_mark(group) for group in by_rank[0]]
    for groups in by_rank:
        merged.of_rank.append(dict(enumerate(groups)))
        for number, group in enumerate(groups):
            merged._compare(number, marks[number], _mark(group))
    return merged


def of_other_params(by_rank: Sequence[Sequence[HeldGroup]]) -> MergedGroups:
    """Return the groups of ranks that have other parameters. Two groups of one optimizer stay two."""
    merged, marks = MergedGroups(), list[Mark]()
    number_of: dict[str, int] = {}
    for groups in by_rank:
        taken: set[tuple[int, int]] = set()
        merged.numbers.append([])
        merged.of_rank.append({})
        for group in groups:
            mark = _mark(group)
            known = [number_of[fqn] for fqn in group.params if fqn in number_of]
            free = [n for n, m in enumerate(marks) if m == mark and (group.part, n) not in taken]
            if known:  # a replica of what another rank has
                number = known[0]
                merged._compare(number, marks[number], mark)
            elif free:
                number = group.at if group.at in free else free[0]
            else:
                number = merged._add(replace(group, params=()))
                marks.append(mark)
            taken.add((group.part, number))
            merged.numbers[-1].append(number)
            merged.of_rank[-1][number] = group
            new = [fqn for fqn in group.params if fqn not in number_of]
            number_of |= dict.fromkeys(new, number)
            merged.groups[number]["params"] += new  # type: ignore[operator]
    return merged


def _mark(group: HeldGroup) -> Mark:
    return group.optimizer, digests(group.values)


def without_params(groups: Sequence[HeldGroup]) -> list[HeldGroup]:
    """Return the groups without the names of their parameters, which are those of rank 0's."""
    return [replace(group, params=()) for group in groups]
