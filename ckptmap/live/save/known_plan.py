"""What is the same for every save of one run: which rank writes which box, kept from one save to the next.

    names, shapes, boxes, keys of plain values of this rank  ->  its `Structure`, equal to that of a save before?
    every rank says yes                                      ->  the `KnownPlan`: nothing is planned while training waits

Values are no part of it. A rank compares its structure itself, and tells the others only the token of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptmap.live.model.plain_values import PLAIN
from ckptmap.live.optimizer.local_state import LocalState
from ckptmap.live.save.assign_writers import (
    Assignment,
    Drifted,
    Offer,
    ValuesPlace,
    bare_offers,
    is_compared,
    title_of,
)
from ckptmap.live.save.replica_digests import Digest, differ
from ckptmap.protocols import OutTensor
from ckptmap.tensors import Box, Path

MOST_CHUNKS = 100_000
"""A plan of more boxes of all ranks is not kept: it would hold 50 MB between saves."""
MOST_PLANS = 4
"""Plans that are kept, the last ones: a run may save adapters often, and everything seldom."""
_kept: list[KnownPlan] = []


@dataclass(frozen=True)
class Structure:
    """What a save of this rank is but for its values.

    offers    the tensors, without digests
    values    keys and kinds of the plain values
    states    the same of the caller's objects, as if ranks differed in all
    replicas  as the call has it: it decides who writes
    """

    offers: Sequence[Offer]
    values: object
    states: object
    replicas: str

    @classmethod
    def of(cls, held: LocalState, states: LocalState, replicas: str) -> Structure:
        of_states = bare_offers(states.holdings), _kinds(states.values)
        return cls(bare_offers(held.holdings), _kinds(held.values), of_states, replicas)


def _kinds(value: object) -> object:
    """Return the keys and kinds in a nested value. What no checkpoint holds is equal to nothing, so that a save of
    it is planned, and refused, anew."""
    if isinstance(value, Mapping):
        return [(type(key), key, _kinds(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        if PLAIN.issuperset(map(type, value)):
            return type(value)
        return [type(value), *map(_kinds, value)]
    return type(value) if type(value) in PLAIN else object()


class Compared(NamedTuple):
    """A tensor of which ranks compare their values: its name, whether it is a buffer, whether ranks may differ, and
    each rank that has it with the number of its digest there."""

    name: str
    is_buffer: bool
    may_differ: bool
    at: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class KnownPlan:
    """A plan of all ranks.

    token     tells it from others; the same on all ranks
    ranks     the process group
    shared    names of the caller's objects whose state was the same on all ranks
    is_alike  do all ranks compare the same tensors? One digest of all then tells whether they differ
    """

    token: str
    ranks: object
    structure: Structure
    shared: frozenset[str]
    tensors: Sequence[OutTensor]
    records: Mapping[str, Mapping[str, object]]
    places: Mapping[tuple[Path, Box], ValuesPlace]
    compared: Sequence[Compared]
    is_alike: bool

    @classmethod
    def of(
        cls, token: str, ranks: object, structure: Structure, shared: frozenset[str],
        offers: Sequence[Sequence[Offer]], assignment: Assignment, held: LocalState,
    ) -> KnownPlan:  # fmt: skip
        """Return the plan of a save that was planned. held: with the records of all ranks, which are no part of it."""
        records = {key: of for key, of in assignment.records.items() if key not in held.records}
        compared, is_alike = _compared(offers)
        return cls(
            token, ranks, structure, shared, assignment.tensors, records, assignment.places,
            compared, is_alike,
        )  # fmt: skip

    def drifted(self, digests_of: Sequence[Sequence[Digest]], is_checked: bool) -> Drifted | None:
        """Return what differs between ranks; None: replicas do that must not.

        is_checked  False: replicas may differ"""
        found: tuple[list[str], list[str]] = [], []
        for one in self.compared:
            first = digests_of[one.at[0][0]][one.at[0][1]]
            if any(differ(digests_of[rank][at], first) for rank, at in one.at[1:]):
                if is_checked and not one.may_differ:
                    return None
                found[not one.is_buffer].append(one.name)
        return Drifted(*found)


def _compared(offers: Sequence[Sequence[Offer]]) -> tuple[list[Compared], bool]:
    """Return what ranks compare, in the order in which ranks have it, and whether all compare the same."""
    names = [[one.path for one in some if is_compared(one)] for some in offers]
    at: dict[Path, list[tuple[int, int]]] = {}
    title = {one.path: title_of(one) for some in offers for one in some}
    for rank, paths in enumerate(names):
        for number, path in enumerate(paths):
            at.setdefault(path, []).append((rank, number))
    buffers = {one.path for some in offers for one in some if one.is_buffer}
    free = buffers | {one.path for some in offers for one in some if one.is_own}
    found = [
        Compared(title[path], path in buffers, path in free, ranks) for path, ranks in at.items()
    ]
    return found, all(paths == names[0] for paths in names)


def find(structure: Structure, ranks: object) -> list[KnownPlan]:
    """Return the plans of earlier saves of this structure on these ranks, of those that are kept. They are several
    where only other ranks' structures differ."""
    return [plan for plan in _kept if plan.ranks is ranks and plan.structure == structure]


def keep(plan: KnownPlan) -> None:
    """Keep a plan for later saves, the same on all ranks."""
    if sum(len(tensor.chunks) for tensor in plan.tensors) <= MOST_CHUNKS:
        _kept[:] = [plan, *_kept][:MOST_PLANS]


def agreed(plans: Sequence[KnownPlan], tokens_of: Sequence[Sequence[str]]) -> KnownPlan | None:
    """Return the plan that all ranks have found, by the tokens of each; None: there is none."""
    common = (plan for plan in plans if all(plan.token in tokens for tokens in tokens_of))
    return next(common, None)
