"""Find the mapping rule whose name pattern matches a key of a checkpoint.

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
        candidates = self._table.get(shape)
        if candidates is None:
            end = tail(shape)
            candidates = None if end is None else self._table.get(end[0])
            if end is None or candidates is None:
                return None, numbers
            numbers = (*numbers, end[1])
        if len(candidates) == 1 and candidates[0].simple:
            return candidates[0], numbers
        candidates = [candidate for candidate in candidates if self._fits(candidate, numbers)]
        if len(candidates) > 1:
            candidates = [candidate for candidate in candidates if self._below(candidate, numbers)]
        if len(candidates) > 1:
            raise self._ambiguous(key, candidates)
        return (candidates[0] if candidates else None), numbers

    def _fits(self, candidate: Candidate, numbers: tuple[int, ...]) -> bool:
        if candidate.shifts is None:
            self._prepare(candidate)
        assert candidate.shifts is not None
        for hole, number, shift, ends in zip(
            candidate.name.holes, numbers, candidate.shifts, candidate.ranges, strict=True
        ):
            if isinstance(hole, int):
                if hole != number:
                    return False
            elif number < shift or not (ends is None or ends[0] <= number - shift < ends[1]):
                return False
        return True

    def _below(self, candidate: Candidate, numbers: tuple[int, ...]) -> bool:
        """Return whether the captures are below their dims: it separates `layers.{n}` from `layers.{k+n}`."""
        for name, value in candidate.captures(numbers).items():
            size = self._dims.size(name)
            if size is not None and value >= size:
                return False
        return True

    def _prepare(self, candidate: Candidate) -> None:
        """Evaluate offsets and ranges, once a key with the candidate's skeleton occurs."""
        try:
            candidate.shifts = candidate.name.shifts(self._dims)
            ranges = (
                {}
                if candidate.drop
                else capture_ranges(self._scheme.rules[candidate.rule], self._dims)
            )
        except Unknown as unknown:
            raise missing_config(self._scheme, unknown.names, candidate.name.text) from unknown
        candidate.ranges = tuple(
            None if isinstance(hole, int) else ranges.get(hole.name)
            for hole in candidate.name.holes
        )
        candidate.simple = not any(candidate.shifts) and all(
            not isinstance(hole, int) and ends is None
            for hole, ends in zip(candidate.name.holes, candidate.ranges, strict=True)
        )

    def _ambiguous(self, key: str, candidates: Sequence[Candidate]) -> PlanError:
        scheme = self._scheme
        labels = [
            scheme.rules[candidate.rule].label
            if candidate.drop is None
            else f"drop ({candidate.name.text})"
            for candidate in candidates
        ]
        if self._dims.missing and not self._dims.has_config:
            subject = f"{key} could match {' or '.join(labels)}"
            return missing_config(scheme, list(self._dims.missing), subject)
        return PlanError(
            "CKM608",
            f"{scheme.title}: {key} matches {' and '.join(labels)}, expected one rule",
            "correct the mapping file: give the rules a `when` or a `range`",
        )
