"""Patterns of `--rename`: a whole key on each side, with captures for the segments that stay.

    encoder.{n}.attn.{x}=layers.{n}.self_attn.{x}
    encoder.3.attn.q.weight -> layers.3.self_attn.q.weight

A capture stands for one segment between dots or more. Both sides have the same captures, each once,
so two keys never become one by the same pattern. (In mapping files a capture is a number: rules there
say what happens to each tensor, these move whole branches of a model.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckptmap.core.printable import advised
from ckptmap.errors import PlanError

_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)\}")
MAX_SEGMENTS = 64
"""Segments of a pattern, and of a key that a pattern with several captures is matched with: no model
has longer names, and a pattern may come from the manifest of a stranger."""
MAX_WAYS = 1000
"""Ways in which a pattern may match one key; all of them are compared."""
_LETTERS = "xyz"


@dataclass(frozen=True)
class SegmentCapture:
    """`{x}`; it stands for at least `least` segments."""

    name: str
    least: int = 1


Segment = str | SegmentCapture


@dataclass(frozen=True)
class RenamePattern:
    """One pattern: a key that `old` matches is named by `new`."""

    text: str
    old: tuple[Segment, ...]
    new: tuple[Segment, ...]

    @cached_property
    def _ends(self) -> tuple[str, str]:
        """What every key that matches begins and ends with."""
        first, last = self.old[0], self.old[-1]
        return (first if isinstance(first, str) else "", last if isinstance(last, str) else "")

    def renamed(self, key: str) -> str | None:
        """Return the new name of a key; None: the pattern does not match it.

        Raises PlanError CKM618 where the key matches in two ways that give two names.
        """
        head, tail = self._ends
        if not key.startswith(head) or not key.endswith(tail):
            return None
        segments = key.split(".")
        captures = sum(isinstance(segment, SegmentCapture) for segment in self.old)
        if captures > 1 and len(segments) > MAX_SEGMENTS:
            raise PlanError(
                "CKM618",
                f"--rename {self.text!r}: {key[:60]!r}... has {len(segments)} segments, expected at"
                f" most {MAX_SEGMENTS} for a pattern with several captures",
                "use a pattern with one capture",
            )
        found: str | None = None
        for way, captured in enumerate(_matches(self.old, segments)):
            name = ".".join(part for segment in self.new for part in _filled(segment, captured))
            if way == MAX_WAYS or (found is not None and name != found):
                ways = (
                    f"in two ways, as {found!r} and {name!r}" if name != found else "in many ways"
                )
                raise PlanError(
                    "CKM618",
                    f"--rename {self.text!r}: {key!r} matches {ways}",
                    "put more of the key into the pattern, so that one way is left",
                )
            found = name
        return found


def parse_pattern(text: str) -> RenamePattern:
    """Parse `OLD=NEW`. Raises PlanError CKM618 where it is malformed, or no bijection."""
    sides = [side.strip() for side in text.split("=")]
    if len(sides) != 2 or not all(sides):
        example = advised(rename="student.{x}={x}")
        raise PlanError(
            "CKM618",
            f"--rename {text!r}: expected OLD=NEW with one '='",
            f"write OLD=NEW, whole keys with {{captures}} between dots: {example}",
        )
    if sides[1].startswith(">"):
        meant = f"{sides[0]}={sides[1].removeprefix('>').strip()}"
        raise PlanError(
            "CKM618",
            f"--rename {text!r}: the new name {sides[1]!r} begins with '>', expected OLD=NEW",
            f"write '=' between the names: {advised(rename=meant)}",
        )
    old, new = (_segments(side, text) for side in sides)
    names = [
        [part.name for part in side if isinstance(part, SegmentCapture)] for side in (old, new)
    ]
    for side in names:
        twice = next((name for name in side if side.count(name) > 1), None)
        if twice is not None:
            raise PlanError(
                "CKM618",
                f"--rename {text!r}: has the capture {{{twice}}} twice on one side",
                "give each capture its own name",
            )
    lone = set(names[0]) ^ set(names[1])
    if lone:
        raise PlanError(
            "CKM618",
            f"--rename {text!r}: {{{min(lone)}}} is on one side only, so several keys could become one",
            "give both sides the same captures",
        )
    return RenamePattern(text, *_joined(old, new))


def _segments(side: str, text: str) -> list[Segment]:
    segments: list[Segment] = []
    if side.count(".") >= MAX_SEGMENTS:
        raise PlanError(
            "CKM618",
            f"--rename {text[:60]!r}...: a side has more than {MAX_SEGMENTS} segments",
            "use a capture for several of them",
        )
    for part in side.split("."):
        match = _CAPTURE.fullmatch(part)
        if match is None and ("{" in part or "}" in part or "*" in part or not part):
            problem = "is empty" if not part else "is not a capture"
            raise PlanError(
                "CKM618",
                f"--rename {text!r}: the segment {part!r} {problem}",
                _with_captures(text)
                + "a capture is a whole segment between dots, such as {x}; it takes one segment or more",
            )
        segments.append(part if match is None else SegmentCapture(match[1]))
    return segments


def _with_captures(text: str) -> str:
    """Return the pattern that a glob means, as the begin of a hint: `a.*=b.*` is `a.{x}=b.{x}`; "" where it means none."""
    sides = [side.strip().split(".") for side in text.split("=")]
    stars = [side.count("*") for side in sides]
    if len(set(stars)) != 1 or not 0 < stars[0] <= len(_LETTERS):
        return ""
    written = []
    for side in sides:
        letters = iter(_LETTERS)
        written.append(".".join(f"{{{next(letters)}}}" if part == "*" else part for part in side))
    meant = "=".join(written)
    return "" if "*" in meant else f"did you mean {advised(rename=meant)}? "


def _joined(
    old: list[Segment], new: list[Segment]
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Make one capture of two that are neighbours on both sides: how a key is divided between them
    does not matter then."""
    at = 0
    while at < len(old) - 1:
        first, second = old[at], old[at + 1]
        if isinstance(first, SegmentCapture) and isinstance(second, SegmentCapture):
            there = new.index(first)
            if new[there + 1 : there + 2] == [second]:
                both = SegmentCapture(first.name, first.least + second.least)
                old[at : at + 2], new[there : there + 2] = [both], [both]
                continue
        at += 1
    return tuple(old), tuple(new)


def _matches(pattern: Sequence[Segment], segments: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """Yield the segments of each capture, for every way in which the pattern matches."""
    if not pattern:
        if not segments:
            yield {}
        return
    first, rest = pattern[0], pattern[1:]
    if isinstance(first, str):
        if segments and segments[0] == first:
            yield from _matches(rest, segments[1:])
        return
    needed = sum(part.least if isinstance(part, SegmentCapture) else 1 for part in rest)
    most = len(segments) - needed
    least = most if not any(isinstance(part, SegmentCapture) for part in rest) else first.least
    for count in range(max(least, first.least), most + 1):
        for captured in _matches(rest, segments[count:]):
            yield {first.name: list(segments[:count]), **captured}


def _filled(segment: Segment, captured: dict[str, list[str]]) -> list[str]:
    return [segment] if isinstance(segment, str) else captured[segment.name]
