"""Find the rule that a key belongs to.

A key is looked up by its skeleton (`layers.{}.w`), then its numbers, `range` and dims choose among the
candidates. One dict lookup a key keeps 100,000 keys cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptmap.errors import PlanError
from ckptmap.mapping.completeness import capture_ranges
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.expressions import Unknown
from ckptmap.mapping.name_patterns import NamePattern, skeleton, tail
from ckptmap.mapping.rule_errors import missing_config
from ckptmap.mapping.rules import Drop, NamingScheme


@dataclass(slots=True)
class Candidate:
    """One name pattern of a rule's term, or of a `[[drop]]`, ready to be matched with keys."""

    name: NamePattern
    rule: int
    term: int
    drop: Drop | None = None
    shifts: tuple[int, ...] | None = None
    ranges: tuple[tuple[int, int] | None, ...] = ()
    simple: bool = False
    """Every number in the key is a capture without offset and without `range`."""

    def captures(self, numbers: tuple[int, ...]) -> dict[str, int]:
        """Return the captures that the numbers of a key stand for."""
        shifts = self.shifts or (0,) * len(numbers)
        return {
            hole.name: number - shift
            for hole, number, shift in zip(self.name.holes, numbers, shifts, strict=True)
            if not isinstance(hole, int)
        }


class KeyMatcher:
    """The name patterns of one side; `active` says whether each rule applies, None where unknown."""

    def __init__(
        self, scheme: NamingScheme, hub: bool, dims: Dims, active: Sequence[bool | None]
    ) -> None:
        self._scheme, self._dims = scheme, dims
        self._table: dict[str, list[Candidate]] = {}
        for index, rule in enumerate(scheme.rules):
            if active[index] is False:
                continue
            for number, term in enumerate(rule.side(hub)):
                for name in term.names:
                    self._table.setdefault(name.skeleton, []).append(Candidate(name, index, number))
        for drop in scheme.drops:
            if drop.hub == hub and dims.holds(drop.when) is not False:
                for name in drop.names:
                    self._table.setdefault(name.skeleton, []).append(Candidate(name, -1, 0, drop))

    def find(self, key: str) -> tuple[Candidate | None, tuple[int, ...]]:
        """Return the candidate that matches a key, and the numbers in the key.

        Raises PlanError CKM608 where two match, CKM605 where a config would decide between them.
        """
        shape, numbers = skeleton(key)
        ways = self._table.get(shape)
        if ways is None:
            end = tail(shape)
            ways = None if end is None else self._table.get(end[0])
            if end is None or ways is None:
                return None, numbers
            numbers = (*numbers, end[1])
        if len(ways) == 1 and ways[0].simple:
            return ways[0], numbers
        ways = [way for way in ways if self._fits(way, numbers)]
        if len(ways) > 1:
            ways = [way for way in ways if self._below(way, numbers)]
        if len(ways) > 1:
            raise self._ambiguous(key, ways)
        return (ways[0] if ways else None), numbers

    def _fits(self, way: Candidate, numbers: tuple[int, ...]) -> bool:
        if way.shifts is None:
            self._prepare(way)
        assert way.shifts is not None
        for hole, number, shift, ends in zip(
            way.name.holes, numbers, way.shifts, way.ranges, strict=True
        ):
            if isinstance(hole, int):
                if hole != number:
                    return False
            elif number < shift or not (ends is None or ends[0] <= number - shift < ends[1]):
                return False
        return True

    def _below(self, way: Candidate, numbers: tuple[int, ...]) -> bool:
        """Return whether the captures are below their dims: it separates `layers.{n}` from `layers.{k+n}`."""
        for name, value in way.captures(numbers).items():
            size = self._dims.size(name)
            if size is not None and value >= size:
                return False
        return True

    def _prepare(self, way: Candidate) -> None:
        """Evaluate offsets and ranges, once a key with the candidate's skeleton occurs."""
        try:
            way.shifts = way.name.shifts(self._dims)
            ranges = {} if way.drop else capture_ranges(self._scheme.rules[way.rule], self._dims)
        except Unknown as unknown:
            raise missing_config(self._scheme, unknown.names, way.name.text) from unknown
        way.ranges = tuple(
            None if isinstance(hole, int) else ranges.get(hole.name) for hole in way.name.holes
        )
        way.simple = not any(way.shifts) and all(
            not isinstance(hole, int) and ends is None
            for hole, ends in zip(way.name.holes, way.ranges, strict=True)
        )

    def _ambiguous(self, key: str, ways: Sequence[Candidate]) -> PlanError:
        scheme = self._scheme
        labels = [
            scheme.rules[way.rule].label if way.drop is None else f"drop ({way.name.text})"
            for way in ways
        ]
        if self._dims.missing and not self._dims.has_config:
            what = f"{key} could match {' or '.join(labels)}"
            return missing_config(scheme, list(self._dims.missing), what)
        return PlanError(
            "CKM608",
            f"{scheme.title}: {key} matches {' and '.join(labels)}, expected one rule",
            "correct the mapping file: give the rules a `when` or a `range`",
        )
