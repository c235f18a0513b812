"""Check that a checkpoint has every key a rule needs, for every value of the rule's captures.

A gap is an error: a missing layer or expert must not pass unnoticed into the target's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ckptmap.errors import PlanError
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.expressions import Unknown
from ckptmap.mapping.name_patterns import NamePattern
from ckptmap.mapping.rule_errors import missing_config
from ckptmap.mapping.rules import NamingScheme, Rule


def check_complete(
    scheme: NamingScheme,
    to_hub: bool,
    dims: Dims,
    active: Sequence[bool | None],
    captures: Sequence[set[tuple[int, ...]]],
) -> None:
    """Raise PlanError CKM607 for the first key that is missing or that should not be there.

    `active` says whether each rule applies (None: unknown, there is no config). `captures` holds, for
    each rule, the values of the shared captures for which the checkpoint has keys.
    """
    counts = _counts(scheme, dims, captures)
    for rule, holds, captured in zip(scheme.rules, active, captures, strict=True):
        if holds is False or (not captured and (rule.optional != "no" or holds is None)):
            continue
        try:
            known = capture_ranges(rule, dims)
        except Unknown as unknown:
            raise missing_config(scheme, unknown.names, rule.label) from unknown
        ends = [known.get(name, (0, counts.get(name, 0))) for name in rule.shared]
        ranges = [range(low, high) for low, high in ends]
        check = _Check(scheme, to_hub, dims, rule)
        if rule.optional != "any":
            check.check_product(captured, ranges)
            continue
        # A layer may have experts or none, but if any, then all of them.
        for first in sorted({numbers[0] for numbers in captured if len(numbers) > 1}):
            mine = {numbers for numbers in captured if numbers[0] == first}
            check.check_product(mine, [range(first, first + 1), *ranges[1:]])
    _check_either(scheme, to_hub, dims, active, captures, counts)


def _check_either(
    scheme: NamingScheme,
    to_hub: bool,
    dims: Dims,
    active: Sequence[bool | None],
    captures: Sequence[set[tuple[int, ...]]],
    counts: Mapping[str, int],
) -> None:
    """Check rules with `either`: each layer has all keys of one word's rules and none of another's."""
    rules = [
        (rule, {numbers[0] for numbers in captured})
        for rule, captured, holds in zip(scheme.rules, captures, active, strict=True)
        if rule.either and (holds or (holds is None and captured))
    ]
    for number in range(max((counts.get(rule.shared[0], 0) for rule, _ in rules), default=0)):
        words_present = dict.fromkeys(rule.either for rule, present in rules if number in present)
        expected = words_present or dict.fromkeys(rule.either for rule, _ in rules)
        missing = [
            rule for rule, present in rules if rule.either in expected and number not in present
        ]
        if len(words_present) == 1 and not missing:
            continue
        rule = missing[0] if missing else next(r for r, present in rules if number in present)
        raise _Check(scheme, to_hub, dims, rule).neither(number, list(expected), bool(missing))


def capture_ranges(rule: Rule, dims: Dims) -> dict[str, tuple[int, int]]:
    """Return (first, end) for each capture that has a `range`. Raises Unknown."""
    return {name: (dims.number(low), dims.number(end)) for name, (low, end) in rule.ranges.items()}


def _counts(
    scheme: NamingScheme, dims: Dims, captures: Sequence[set[tuple[int, ...]]]
) -> dict[str, int]:
    """Return how many values each capture has: its dim where that is known, else by the keys."""
    counts: dict[str, int] = {}
    for rule, captured in zip(scheme.rules, captures, strict=True):
        for at, name in enumerate(rule.shared):
            size = dims.size(name)
            if size is None:
                most = max((numbers[at] + 1 for numbers in captured), default=0)
                size = max(counts.get(name, 0), most)
            counts[name] = size
    return counts


class _Check:
    """The check of one rule, and its error texts."""

    def __init__(self, scheme: NamingScheme, to_hub: bool, dims: Dims, rule: Rule) -> None:
        self.scheme, self.dims, self.rule = scheme, dims, rule
        self.name = rule.side(not to_hub)[0].names[0]

    def check_product(self, present: set[tuple[int, ...]], ranges: Sequence[range]) -> None:
        """Raise PlanError CKM607 unless `present` is the product of the ranges."""
        columns = zip(zip(*present, strict=True), ranges, strict=True) if present else ()
        if len(present) == prod(map(len, ranges)) and all(
            min(column) >= r.start and max(column) < r.stop for column, r in columns
        ):
            return
        missing = next((numbers for numbers in _numbers(ranges) if numbers not in present), None)
        if missing is not None:
            raise self._error(
                f"{self._key(missing)} is missing, found {len(present)} of {prod(map(len, ranges))}",
                "the checkpoint is incomplete, or the config belongs to another model; a rule of your"
                " own may say `optional = true`",
            )
        beyond = next(numbers for numbers in sorted(present) if not _within(numbers, ranges))
        ends = ", ".join(
            f"{c} below {r.stop}" for c, r in zip(self.rule.shared, ranges, strict=True)
        )
        raise self._error(
            f"{self._key(beyond)} is not expected, expected {ends}",
            "give the config.json of exactly this model with --config-from",
        )

    def neither(self, number: int, words: Sequence[str], missing: bool) -> PlanError:
        """Return the error for one value of the first capture that has keys of no word, or of two."""
        key = self._key((number, *(0 for _ in self.rule.shared[1:])))
        expectation = (
            f"expected {self.rule.shared[0]} {number} to have all keys of {' or '.join(words)}"
        )
        if missing:
            problem = f"{key} is missing, {expectation}"
        else:
            problem = f"{key} is not expected, {expectation} and no others"
        return self._error(problem, "the checkpoint is incomplete, or belongs to another model")

    def _key(self, numbers: Sequence[int]) -> str:
        captures = dict(zip(self.rule.shared, numbers, strict=True))
        return _rendered(self.name, captures, self.dims)

    def _error(self, problem: str, hint: str) -> PlanError:
        message = f"{self.scheme.title}: {self.rule.label}: {problem}; {self.dims.describe()}"
        return PlanError("CKM607", message, hint)


def _numbers(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Yield the product of the ranges one by one: a config may claim a billion layers."""
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        for rest in _numbers(ranges[1:]):
            yield (first, *rest)


def _within(numbers: Sequence[int], ranges: Sequence[range]) -> bool:
    return all(number in r for number, r in zip(numbers, ranges, strict=True))


def _rendered(name: NamePattern, captures: dict[str, int], dims: Dims) -> str:
    """Return the key for these captures; captures that are stacked are shown as 0."""
    whole = {capture: captures.get(capture, 0) for capture in name.captures}
    return name.render(whole, name.shifts(dims))
