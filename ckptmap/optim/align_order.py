"""Match the parameters of an optimizer's groups to those of the model, by order and shape.

groups [[A, C], [B]], sequence A B C  ->  group 0 takes places 0 and 2, group 1 place 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

MAX_STATES = 2000
"""Ways to match that are followed at once; real models have one or two. More mean that shapes tell nothing."""

SORTED_TOO = "the shapes allow the model's order, and that of sorted names (10 before 2)"
DO_NOT_FIT = "the shapes do not fit its order"

Item = TypeVar("Item")
Place = TypeVar("Place")

State = tuple[int, ...]
"""How many items of each group are placed."""


def align(
    groups: Sequence[Sequence[Item]],
    sequence: Sequence[Place],
    fits: Callable[[Item, Place], bool],
) -> list[list[int]] | str:
    """Return the places of every group's items, ascending in each group, if exactly one reading
    fits; else the reason.

    Places may be skipped, items may not. One pass over the sequence keeps every reading that is
    still possible, with the number of ways to it (2 stands for more) and its last step.
    """
    sizes = tuple(map(len, groups))
    skips = len(sequence) - sum(sizes)
    start: State = (0,) * len(groups)
    counts_of: dict[State, int] = {start: 1}
    steps: list[dict[State, int]] = []  # of each state after a place: the group that took it
    for at, place in enumerate(sequence):
        next_counts: dict[State, int] = {}
        step: dict[State, int] = {}
        for state, count in counts_of.items():
            for group, done in enumerate(state):
                if done < sizes[group] and fits(groups[group][done], place):
                    next_state = (*state[:group], done + 1, *state[group + 1 :])
                    next_counts[next_state] = min(2, next_counts.get(next_state, 0) + count)
                    step[next_state] = group
            if at + 1 - sum(state) <= skips:
                next_counts[state] = min(2, next_counts.get(state, 0) + count)
                step[state] = -1
        if len(next_counts) > MAX_STATES:
            return "the shapes allow many orders"
        counts_of = next_counts
        steps.append(step)
    orders = counts_of.get(sizes, 0)
    if orders == 1:
        return _walk(steps, sizes)
    return "the shapes allow several orders" if orders else DO_NOT_FIT


def align_named(
    groups: Sequence[Sequence[Item]],
    sequence: Sequence[Place],
    names: Sequence[str],
    fits: Callable[[Item, Place], bool],
) -> list[list[int]] | str:
    """Return what `align` returns, or a reason if the groups could also come from sorted names and
    would then mean other places.

    minGPT, and what follows it, makes sets of names for decay and no decay and sorts them: layer
    10 comes before 2. With one group there is nothing to sort: it is `model.parameters()`.
    """
    aligned = align(groups, sequence, fits)
    if isinstance(aligned, str) or sum(map(bool, groups)) < 2:
        return aligned
    name_order = sorted(range(len(sequence)), key=names.__getitem__)
    if all(names[a] < names[b] for group in aligned for a, b in pairwise(group)):
        return aligned
    by_name_aligned = align(groups, [sequence[place] for place in name_order], fits)
    if by_name_aligned == DO_NOT_FIT or aligned == _renumbered(by_name_aligned, name_order):
        return aligned
    return SORTED_TOO


def _renumbered(aligned: list[list[int]] | str, places: Sequence[int]) -> list[list[int]]:
    return [] if isinstance(aligned, str) else [[places[at] for at in group] for group in aligned]


def _walk(steps: Sequence[dict[State, int]], end: State) -> list[list[int]]:
    places: list[list[int]] = [[] for _ in end]
    state = end
    for at in reversed(range(len(steps))):
        group = steps[at][state]
        if group >= 0:
            places[group].append(at)
            state = (*state[:group], state[group] - 1, *state[group + 1 :])
    return [list(reversed(order)) for order in places]
