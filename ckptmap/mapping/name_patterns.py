"""Patterns of whole keys with numbers captured: `model.layers.{n}.mlp.experts.{e}.w1`, `mtp.{n-L}.norm`.

A key is looked up by its skeleton, in which `{}` replaces every number segment. A checkpoint of 100,000
keys then costs one dict lookup a key, however many rules there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from ckptmap.core.name_shapes import without_numbers
from ckptmap.errors import PlanError

if TYPE_CHECKING:
    from ckptmap.mapping.dims_table import Dims
    from ckptmap.mapping.expressions import Expr

_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)(?:([+-])([^{}]+))?\}")
_NUMBER = re.compile(r"(?<![^.])(0|[1-9]\d{0,17})(?![^.])")
_TAIL = re.compile(r"(?<=[^\d.{}])(?:0|[1-9]\d{0,17})\Z")
HOLE = "{}"


def skeleton(key: str) -> tuple[str, tuple[int, ...]]:
    """Split numbers off a name: `"layers.12.w"` -> (`"layers.{}.w"`, (12,)).

    `"01"` stays text: as a number it would come back as 1.
    """
    parts = _NUMBER.split(key)
    if len(parts) == 1:
        return key, ()
    return HOLE.join(parts[::2]), tuple(map(int, parts[1::2]))


def tail(shape: str) -> tuple[str, int] | None:
    """Split a number off the last segment: `"experts.weight12"` -> (`"experts.weight{}"`, 12)."""
    match = _TAIL.search(shape)
    return None if match is None else (shape[: match.start()] + HOLE, int(match[0]))


def skeletons(keys: Collection[str]) -> Sequence[str]:
    """Return the skeleton of each key; one search for all keys that differ in digits alone, and none for the keys
    that were asked for last."""
    return _skeletons(tuple(keys))


@lru_cache(maxsize=1)
def _skeletons(keys: tuple[str, ...]) -> Sequence[str]:
    return without_numbers(keys, lambda key: skeleton(key)[0])


@dataclass(frozen=True)
class Capture:
    """`{n}`, or `{n-L}`: the number in the key is `n` plus `sign` times `offset`."""

    name: str
    sign: int = 1
    offset: Expr | None = None

    def shift(self, dims: Dims) -> int:
        """Return the number in a key minus the capture. Raises Unknown."""
        return 0 if self.offset is None else self.sign * dims.number(self.offset)


@dataclass(frozen=True)
class NamePattern:
    """One pattern; `holes` are its number segments in order, literal or captured."""

    text: str
    skeleton: str
    holes: tuple[int | Capture, ...]

    @cached_property
    def captures(self) -> tuple[str, ...]:
        return tuple(hole.name for hole in self.holes if isinstance(hole, Capture))

    def shifts(self, dims: Dims) -> tuple[int, ...]:
        """Return, for each hole, the number in a key minus the capture. Raises Unknown."""
        return tuple(0 if isinstance(hole, int) else hole.shift(dims) for hole in self.holes)

    def render(self, captures: dict[str, int], shifts: Sequence[int]) -> str:
        """Return the key for these captures."""
        numbers = (
            hole if isinstance(hole, int) else captures[hole.name] + shift
            for hole, shift in zip(self.holes, shifts, strict=True)
        )
        parts = self.skeleton.split(HOLE)
        return parts[0] + "".join(f"{n}{part}" for n, part in zip(numbers, parts[1:], strict=True))

    def meets(self, other: NamePattern) -> bool:
        """Return whether one key could match both patterns."""
        return self.skeleton == other.skeleton and all(
            a == b or isinstance(a, Capture) or isinstance(b, Capture)
            for a, b in zip(self.holes, other.holes, strict=True)
        )


def parse_names(text: str, where: str) -> tuple[NamePattern, ...]:
    """Parse `"a.{n} | b.{n}"` into its alternatives. Raises PlanError CKM601."""
    names = tuple(_one(part.strip(), where) for part in text.split("|"))
    if len({frozenset(name.captures) for name in names}) > 1:
        raise PlanError(
            "CKM601", f"{where}: alternatives {text!r} have different captures",
            "give each alternative the same {captures}",
        )  # fmt: skip
    return names


def _one(text: str, where: str) -> NamePattern:
    if not text or any(char.isspace() for char in _CAPTURE.sub("", text)):
        raise PlanError(
            "CKM601", f"{where}: {text!r} is not a name: it is empty or contains white space",
            "write a whole key such as layers.{n}.norm.weight",
        )  # fmt: skip
    return NamePattern(text, *_parsed(text, where))


def _expression(text: str) -> Expr:
    from ckptmap.mapping.expressions import parse_expr  # deferred: names are recognized without

    return parse_expr(text)


def _parsed(text: str, where: str) -> tuple[str, tuple[int | Capture, ...]]:
    segments, holes = [], list[int | Capture]()
    parts = list(_segments(text))
    for at, segment in enumerate(parts):
        match = _CAPTURE.search(segment)
        before = segment[: match.start()] if match is not None else ""
        whole = match is not None and match.end() == len(segment) and "{" not in before
        if match is not None and whole and (not before or at == len(parts) - 1):
            offset = None if match[3] is None else _expression(match[3])
            holes.append(Capture(match[1], -1 if match[2] == "-" else 1, offset))
            segments.append(before + HOLE)
        elif "{" in segment or "}" in segment:
            raise PlanError(
                "CKM601", f"{where}: {text!r}: {segment!r} is not a capture",
                "a capture is a whole segment between dots, {n}, {n-L}, {n+1}, or the end of the"
                " last one, weight{e}",
            )  # fmt: skip
        elif _NUMBER.fullmatch(segment):
            holes.append(int(segment))
            segments.append(HOLE)
        else:
            segments.append(segment)
    captures = [hole.name for hole in holes if isinstance(hole, Capture)]
    if len(set(captures)) != len(captures):
        raise PlanError(
            "CKM601", f"{where}: {text!r} has one capture twice", "give each capture its own name"
        )
    return ".".join(segments), tuple(holes)


def _segments(text: str) -> Iterator[str]:
    """Split at dots, except those inside a capture (`{n-a.b}`)."""
    start = depth = 0
    for at, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "." and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]
