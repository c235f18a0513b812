"""Match names with the patterns of options: globs, and the ranges that `inspect` prints.

model.layers.{0..2}.*          matches model.layers.0.mlp.up_proj.weight, not model.layers.3.norm.weight
layers.{0..31, 8 of them}.w    as the table has it where numbers are missing: any number of the range
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

NEAREST = 2
"""Names that are proposed for a pattern."""
SEARCHED = 5000
"""Names among which the nearest is looked for: comparing spellings is slow."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)(?:, \d+ of them)?\}")
_WILD = "*?[{"
"""Characters of which one makes a segment stand for several."""
_PLACE = "\ue000"
"""A private character, which no glob treats in a special way: it stands for a range in one."""


def matches(name: str, pattern: str) -> bool:
    """Return whether the pattern matches the whole name; a name without wild cards matches itself."""
    return name == pattern or _matcher(pattern)(name)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns matches the name."""
    return any(matches(name, pattern) for pattern in patterns)


def only(name: str) -> str:
    """Return the pattern that matches this name alone: `a[0].*` -> `a[[]0].[*]`."""
    return re.sub(r"[*?[{]", r"[\g<0>]", name)


def suggestion(pattern: str, names: Collection[str]) -> str:
    """Return what may be meant by a pattern that matches none of the names, as a question; "" where no
    name is near."""
    for wider in (f"{pattern}.*", f"*{pattern}", f"*{pattern}.*", f"{pattern}*", f"*{pattern}*"):
        count = sum(matches(name, wider) for name in names)
        if count:
            return f"did you mean {wider!r}, which matches {count}?"
    respelt = _respelt(pattern, list(names)[:SEARCHED])
    if respelt:
        count = sum(matches(name, respelt) for name in names)
        return f"did you mean {respelt!r}, which matches {count}?"
    text = pattern.replace("*", "")
    import difflib  # here: most runs need no suggestion, and it takes as long to import as 20 modules

    near = difflib.get_close_matches(text, list(names)[:SEARCHED], NEAREST)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _respelt(pattern: str, names: Collection[str]) -> str:
    """Return the pattern with misspelt segments corrected, where it then matches; "" otherwise.

    model.layer.0.*    -> model.layers.0.*
    *.expert.*         -> *.experts.*
    """
    if not set(pattern) & {*_WILD}:
        return ""  # the nearest name says more
    import difflib

    left = [name.split(".") for name in names]
    is_head = True  # no segment before this one stands for several
    segments = pattern.split(".")
    for at, segment in enumerate(segments):
        if not segment or set(segment) & {*_WILD, "}"}:
            is_head = False
            continue
        places = slice(at, at + 1) if is_head else slice(None)
        known = list(dict.fromkeys(word for name in left for word in name[places]))
        if segment not in known:
            near = difflib.get_close_matches(segment, known, 1)
            if not near:
                return ""
            segments[at] = near[0]
        left = [name for name in left if segments[at] in name[places]]
    respelt = ".".join(segments)
    found = respelt != pattern and any(matches(name, respelt) for name in names)
    return respelt if found else ""


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> Callable[[str], bool]:
    ranges = [(int(low), int(high)) for low, high in _RANGE.findall(pattern)]
    if not ranges:
        whole = re.compile(fnmatch.translate(pattern))
        return lambda name: whole.match(name) is not None
    text = fnmatch.translate(_RANGE.sub(_PLACE, pattern)).replace(_PLACE, r"(\d+)")
    with_numbers = re.compile(text)

    def in_ranges(name: str) -> bool:
        found = with_numbers.match(name)
        return found is not None and all(
            low <= int(number) <= high
            for number, (low, high) in zip(found.groups(), ranges, strict=True)
        )

    return in_ranges
