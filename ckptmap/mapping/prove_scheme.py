"""Prove a mapping file when it is loaded, without any checkpoint.

Both sides of each rule must have the same axes, slices must tile, no two rules may match one key, and
mapping there and back must be the identity. The round trip runs the engine that maps checkpoints, with
prime extents, so that two axes that are mixed up change a shape or a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, count

from ckptmap.core.strided_boxes import Piece, compose
from ckptmap.errors import PlanError
from ckptmap.mapping import value_ops
from ckptmap.mapping.dims_table import KNOWN, Dims
from ckptmap.mapping.expressions import Expr, Unknown, Value
from ckptmap.mapping.name_patterns import Capture, NamePattern
from ckptmap.mapping.rearrange import build_targets, example_sources, stacked_captures
from ckptmap.mapping.rule_tensors import RuleSource, RuleTarget
from ckptmap.mapping.rules import NamingScheme, Rule, Term


def prove(scheme: NamingScheme) -> None:
    """Raise PlanError CKM602, naming the rule, or CKM613 for an unknown value operation."""
    for rule in scheme.rules:
        _RuleCheck(scheme, rule).prove()
    for hub in (True, False):
        _check_disjoint(scheme, hub)
    _check_acyclic(scheme)
    for rule in scheme.rules:
        if not rule.is_rename:
            round_trip(scheme, rule)


class _RuleCheck:
    """The checks of one rule that need no sizes."""

    def __init__(self, scheme: NamingScheme, rule: Rule) -> None:
        self.scheme, self.rule = scheme, rule

    def prove(self) -> None:
        rule = self.rule
        if rule.op:
            value_ops.parse_value_op(rule.op)
        for side in (rule.hub, rule.other):
            if len({frozenset(term.captures) for term in side}) > 1:
                raise self._error("tensors of one side have different captures")
        strange = next((name for name in rule.ranges if name not in rule.shared), None)
        if strange is not None:
            raise self._error(f"range of {strange!r}, expected a capture that both sides have")
        if rule.either and not rule.shared:
            raise self._error("either: expected a capture that both sides have")
        if rule.hub == rule.other or (rule.is_rename and self._has_no_axes()):
            return
        self._check_axes()
        self._check_pad()

    def _has_no_axes(self) -> bool:
        return self.rule.hub[0].axes is None and self.rule.other[0].axes is None

    def _check_axes(self) -> None:
        terms = (*self.rule.hub, *self.rule.other)
        if any(term.axes is None for term in terms):
            raise self._error(
                "axes are missing: only a tensor that is renamed without rearranging needs none"
            )
        segments = {term.axes.segments for term in terms if term.axes is not None}
        if len(segments) > 1:
            raise self._error("brackets need the same number of segments on both sides")
        for sheet in range(max(1, *segments)):
            sets = {
                term: self._axes_of(term, hub, sheet)
                for hub in (True, False)
                for term in self.rule.side(hub)
            }
            whole = set().union(*sets.values())
            for term, axes in sets.items():
                if whole - axes:
                    raise self._error(
                        f"axis {sorted(whole - axes)[0]!r} is not an axis of {term.names[0].text},"
                        " expected the same axes in every tensor"
                    )

    def _axes_of(self, term: Term, hub: bool, sheet: int) -> set[str]:
        """Return the axes of one tensor of the rule: of its pattern, its slices and its stacked captures."""
        assert term.axes is not None, "checked before"
        pattern = term.axes.of_sheet(sheet)
        for cut in term.slices:
            if (cut.high is None) == (cut.axis in pattern):
                place = "in" if cut.high is None else "not in"
                raise self._error(
                    f"{term.names[0].text}: axis {cut.axis!r} of the slice is {place} its pattern:"
                    " s[a:b] keeps the axis, s[a] removes it"
                )
        axes = {*pattern, *(cut.axis for cut in term.slices)}
        for name in stacked_captures(self.rule, hub):
            if name in axes:
                raise self._error(f"{name!r} is both a capture and an axis of {term.names[0].text}")
            axes.add(name)
        return axes

    def _check_pad(self) -> None:
        for axis in self.rule.pad:
            for term in self.rule.other:
                assert term.axes is not None, "checked before"
                if (axis,) not in term.axes.dims:
                    raise self._error(
                        f"pad: {axis!r} is not alone in a dim of {term.names[0].text}"
                    )
        if len(self.rule.pad) > 1:
            raise self._error("pad: expected one axis")

    def _error(self, problem: str) -> PlanError:
        return invalid_rule(self.scheme, self.rule, problem)


def invalid_rule(scheme: NamingScheme, rule: Rule, problem: str) -> PlanError:
    """Return PlanError CKM602 for a rule."""
    return PlanError(
        "CKM602", f"{scheme.where}: {rule.label}: {problem}", "correct the mapping file"
    )


# --------------------------------------------------------------------------------- one key, one rule


def _check_disjoint(scheme: NamingScheme, hub: bool) -> None:
    """Raise PlanError CKM602 where two rules match one key and no `when` or `range` separates them."""
    by_skeleton: dict[str, list[tuple[NamePattern, str, bool]]] = {}
    for rule in scheme.rules:
        open_ = rule.when is not None or bool(rule.ranges)
        for term in rule.side(hub):
            for name in term.names:
                by_skeleton.setdefault(name.skeleton, []).append((name, rule.label, open_))
    for drop in scheme.drops:
        for name in drop.names if drop.hub == hub else ():
            by_skeleton.setdefault(name.skeleton, []).append((name, "drop", drop.when is not None))
    for entries in by_skeleton.values():
        for (first, label, open_), (second, other_label, other_open) in combinations(entries, 2):
            if first.meets(second) and not (open_ and other_open) and not _shifted(first, second):
                other_text = f" ({second.text})" if second.text != first.text else ""
                raise PlanError(
                    "CKM602",
                    f"{scheme.where}: {label} and {other_label} both match the key"
                    f" {first.text}{other_text}",
                    "give each rule its own keys, or give both a `when` or `range`",
                )


def _shifted(first: NamePattern, second: NamePattern) -> bool:
    """Return whether the offsets of the captures differ, as in `layers.{n}` and `layers.{k+n}`.

    The dim of the first capture then says where the second one begins.
    """
    return any(
        isinstance(a, Capture) and isinstance(b, Capture) and a.offset != b.offset
        for a, b in zip(first.holes, second.holes, strict=True)
    )


def _check_acyclic(scheme: NamingScheme) -> None:
    """Raise PlanError CKM602 where a dim depends on itself; a config value of its own name is fine."""

    def visit(axis: str, path: tuple[str, ...]) -> None:
        for name in scheme.dims[axis].names():
            if name in path and name != axis:
                raise PlanError(
                    "CKM602", f"{scheme.where}: [dims] {' -> '.join((*path, name))} is circular",
                    "define one of them by config values",
                )  # fmt: skip
            if name in scheme.dims and name not in path:
                visit(name, (*path, name))

    for axis in scheme.dims:
        visit(axis, (axis,))


# --------------------------------------------------------------------------------- there and back


class Primes(Dims):
    """Dims in which every config value, and every axis that depends on none, is another prime."""

    def __init__(self, exprs: Mapping[str, Expr], implied: Sequence[str] = ()) -> None:
        super().__init__(exprs, {})
        self._implied = implied
        self._primes = _primes()
        self._given: dict[str, int] = {}

    def size(self, axis: str) -> int | None:
        if axis in KNOWN and axis not in self._exprs:
            return KNOWN[axis]
        if axis not in self._exprs and axis in self._implied:
            return None
        if axis not in self._given:
            self._given[axis] = self._follows(axis) or next(self._primes)
        return self._given[axis]

    def _follows(self, axis: str) -> int | None:
        if axis not in self._exprs:
            return None
        try:
            return self.number(self._exprs[axis])
        except (Unknown, PlanError):
            return None

    def _of_config(self, name: str) -> Value:
        key = f"config {name}"
        if key not in self._given:
            self._given[key] = next(self._primes)
        return Fraction(self._given[key])


def _primes() -> Iterator[int]:
    primes: list[int] = []
    for number in count(3, 2):
        if all(number % prime for prime in primes):
            primes.append(number)
            yield number


def round_trip(scheme: NamingScheme, rule: Rule) -> None:
    """Raise PlanError CKM602 where an element is elsewhere after hub -> scheme -> hub, or the reverse."""
    implied = [cut.axis for term in (*rule.hub, *rule.other) for cut in term.slices]
    dims = Primes(scheme.dims, implied)
    for hub in (True, False):
        sources = example_sources(scheme, rule, hub, dims)
        captures = dict.fromkeys(rule.shared, 0)
        targets = build_targets(scheme, rule, not hub, dims, sources, captures)
        sources_back = _as_sources(targets, rule, not hub)
        if rule.pad and not hub:  # the zeros of the padding do not come back
            continue
        targets_back = build_targets(scheme, rule, hub, dims, sources_back, captures)
        pieces = {target.name: target.pieces for target in targets}
        for target in targets_back:
            _check_identity(scheme, rule, target, pieces)


def _as_sources(targets: Sequence[RuleTarget], rule: Rule, hub: bool) -> list[RuleSource]:
    """Return targets as the sources of the way back: they come term by term, stack by stack."""
    sources = []
    per_term = len(targets) // len(rule.side(hub))
    for at, target in enumerate(targets):
        stack = _numbers(at % per_term, _stack_sizes(targets, rule, hub))
        sources.append(RuleSource(target.name, at // per_term, stack, target.info))
    return sources


def _stack_sizes(targets: Sequence[RuleTarget], rule: Rule, hub: bool) -> list[int]:
    names = stacked_captures(rule, hub)
    if not names:
        return []
    if len(names) == 1:
        return [len(targets) // len(rule.side(hub))]
    raise PlanError(
        "CKM602", f"{rule.label}: {len(names)} captures are stacked, expected one",
        "stack them in two rules, one after the other",
    )  # fmt: skip


def _numbers(at: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return (at,) if sizes else ()


def _check_identity(
    scheme: NamingScheme,
    rule: Rule,
    target: RuleTarget,
    pieces_there: Mapping[str, Sequence[Piece]],
) -> None:
    numel = 0
    for piece in target.pieces:
        for part in compose(pieces_there[piece.source], [piece]):
            if part.source != target.name or part.src != part.dst:
                raise invalid_rule(scheme, rule, f"{target.name} changes on the way there and back")
            numel += part.numel
    if numel != target.info.numel:
        raise invalid_rule(
            scheme, rule, f"{target.name} comes back with {numel} of {target.info.numel} elements"
        )
