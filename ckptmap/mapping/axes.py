"""Parse axis patterns, which give the dims of a tensor as named axes: `(h two r) i`, `e (two m) i`.

`(h two r) i` is a matrix whose rows run over h, two and r, the last fastest. The axes of a rule span a
space; each tensor of the rule is a box of it (all, a slice, one index) laid out in its own order of axes.
Both sides of a rule lay out the same space, so a rule is a bijection between elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from ckptmap.errors import PlanError
from ckptmap.mapping.expressions import FORM, Expr, parse_expr

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|[()\[\]|]|1)")
_SLICE = re.compile(r"\s*([A-Za-z_]\w*)\s*\[([^\[\]]*)\]\s*")
SCALAR = "scalar"

Segments: TypeAlias = tuple[tuple[str, ...], ...]
"""`[two r | p]`: the axes of each segment."""


@dataclass(frozen=True)
class Slice:
    """`s[low:high]`; or `s[low]` with `high` None, one index of an axis that is not in the pattern."""

    axis: str
    low: Expr
    high: Expr | None


@dataclass(frozen=True)
class Axes:
    """The factors of each dim, outermost first; a factor is an axis, or the segments of brackets."""

    text: str
    dims: tuple[tuple[str | Segments, ...], ...]

    @property
    def segments(self) -> int:
        """The number of segments in its brackets, 0 without brackets."""
        return next((len(f) for dim in self.dims for f in dim if not isinstance(f, str)), 0)

    def names(self) -> list[str]:
        """Return every axis in the order written."""
        return [
            axis
            for dim in self.dims
            for factor in dim
            for axis in ((factor,) if isinstance(factor, str) else _flat(factor))
        ]

    def shape(self, size: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tensor's shape for these extents of axes."""
        return tuple(prod(_extent(factor, size) for factor in dim) for dim in self.dims)

    def lay(self, size: Mapping[str, int], sheet: int) -> AxisLayout:
        """Return where the elements of segment number `sheet` lie in the tensor."""
        offsets, axes = [], {}
        for number, dim in enumerate(self.dims):
            step, offset = 1, 0
            for factor in reversed(dim):
                if isinstance(factor, str):
                    axes[factor] = (number, step)
                else:
                    extents = [prod(size[axis] for axis in segment) for segment in factor]
                    offset += step * sum(extents[:sheet])
                    inner = step
                    for axis in reversed(factor[sheet]):
                        axes[axis] = (number, inner)
                        inner *= size[axis]
                step *= _extent(factor, size)
            offsets.append(offset)
        return AxisLayout(tuple(offsets), axes)

    def of_sheet(self, sheet: int) -> list[str]:
        """Return the axes of the elements of segment number `sheet`."""
        return [
            axis
            for dim in self.dims
            for factor in dim
            for axis in ((factor,) if isinstance(factor, str) else factor[sheet])
        ]


@dataclass(frozen=True)
class AxisLayout:
    """The position of index 0 on every axis (`offsets`, one a dim), and axis -> (dim, step)."""

    offsets: tuple[int, ...]
    axes: Mapping[str, tuple[int, int]]


def _flat(segments: Segments) -> Iterator[str]:
    for segment in segments:
        yield from segment


def _extent(factor: str | Segments, size: Mapping[str, int]) -> int:
    if isinstance(factor, str):
        return size[factor]
    return sum(prod(size[axis] for axis in segment) for segment in factor)


def parse_axes(text: str, where: str) -> tuple[Axes, tuple[Slice, ...]]:
    """Parse the text after `::`. Raises PlanError CKM601."""
    pattern, _, slices = text.partition("@")
    pattern = pattern.strip()
    cuts = tuple(_slices(slices, where)) if slices.strip() else ()
    if pattern == SCALAR:
        return Axes(pattern, ()), cuts
    dims = tuple(_dims(_tokens(pattern, where), pattern, where))
    axes = Axes(pattern, dims)
    counts = {len(f) for dim in dims for f in dim if not isinstance(f, str)}
    if len(counts) > 1 or 1 in counts:
        raise _malformed_axes(
            pattern, where, "brackets need two or more segments, and all the same number"
        )
    for sheet in range(max(1, axes.segments)):
        names = axes.of_sheet(sheet)
        twice = next((axis for axis in names if names.count(axis) > 1), None)
        if twice is not None:
            raise _malformed_axes(pattern, where, f"axis {twice!r} occurs twice")
    return axes, cuts


def _slices(text: str, where: str) -> Iterator[Slice]:
    for part in text.split(","):
        match = _SLICE.fullmatch(part)
        if match is None:
            raise _malformed_axes(part, where, "is not a slice such as s[0:h] or two[0]")
        low, colon, high = match[2].partition(":")
        yield Slice(
            match[1], parse_expr(low.strip() or "0"), parse_expr(high.strip()) if colon else None
        )


def _tokens(text: str, where: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _malformed_axes(text, where, f"cannot be read at {text[at:].strip()[:10]!r}")
        tokens.append(match[1])
        at = match.end()
    if not tokens:
        raise _malformed_axes(text, where, f"is empty; a tensor without dims is `{SCALAR}`")
    return tokens


def _dims(tokens: list[str], text: str, where: str) -> Iterator[tuple[str | Segments, ...]]:
    at = 0
    while at < len(tokens):
        if tokens[at] == "(":
            stop = _closing(tokens, at, text, where)
            yield tuple(_factors(tokens[at + 1 : stop], text, where))
            at = stop + 1
        elif tokens[at] == "[":
            stop = _closing(tokens, at, text, where)
            yield tuple(_factors(tokens[at : stop + 1], text, where))
            at = stop + 1
        else:
            yield tuple(_factors([tokens[at]], text, where))
            at += 1


def _closing(tokens: Sequence[str], at: int, text: str, where: str) -> int:
    pair = {"(": ")", "[": "]"}[tokens[at]]
    if pair not in tokens[at:]:
        raise _malformed_axes(text, where, f"{tokens[at]!r} is not closed")
    return at + tokens[at:].index(pair)


def _factors(tokens: Sequence[str], text: str, where: str) -> Iterator[str | Segments]:
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token == "[":
            stop = _closing(tokens, at, text, where)
            yield tuple(_segments(tokens[at + 1 : stop], text, where))
            at = stop
        elif token in ("(", ")", "]", "|"):
            raise _malformed_axes(text, where, f"unexpected {token!r}")
        elif token != "1":
            yield token
        at += 1


def _segments(tokens: Sequence[str], text: str, where: str) -> Iterator[tuple[str, ...]]:
    segment: list[str] = []
    for token in (*tokens, "|"):
        if token != "|":
            if token in ("(", "["):
                raise _malformed_axes(text, where, f"unexpected {token!r} in a segment")
            segment.append(token)
        elif segment:
            yield tuple(axis for axis in segment if axis != "1")
            segment = []
        else:
            raise _malformed_axes(text, where, "a segment names no axis")


def _malformed_axes(text: str, where: str, problem: str) -> PlanError:
    return PlanError("CKM601", f"{where}: axes {text!r}: {problem}", FORM)
