"""Many keys in few lines: rows that differ only in a layer number are shown once, with the range.

model.layers.{0..31}.self_attn.q_proj.weight  32x [4096, 4096] bfloat16 -> nf4
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NUMBER = re.compile(r"(?<![^.\n])\d+(?![^.\n])")


class Row(NamedTuple):
    """One tensor as a table shows it; a tuple, because there may be 100,000 of them."""

    fqn: str
    role: str
    shape: tuple[int, ...]
    kind: tuple[str, ...]
    fidelity: str
    nbytes: int


@dataclass
class Folded:
    """Rows alike but for numbers in their names."""

    first: Row
    count: int
    nbytes: int
    numbers: list[set[str]]
    """The digits at each place, as they are in names."""

    @property
    def pattern(self) -> str:
        spans = iter([set(map(int, digits)) for digits in self.numbers])
        return NUMBER.sub(lambda match: _span(next(spans), match.group()), self.first.fqn)


def fold(rows: Iterable[Row]) -> list[Folded]:
    """Rows by pattern, in order of first appearance."""
    rows = list(rows)
    found: dict[tuple[object, ...], list[Row]] = {}
    for row, pattern in zip(rows, _patterns([row[0] for row in rows]), strict=True):
        found.setdefault((pattern, *row[1:5]), []).append(row)
    return [
        Folded(alike[0], len(alike), sum([row[5] for row in alike]), _numbers(alike))
        for alike in found.values()
    ]


def _patterns(names: Sequence[str]) -> list[str]:
    """Each name without its numbers; a look at the whole text takes a third of the time."""
    found = NUMBER.sub("\0", "\n".join(names)).split("\n")
    if len(found) != len(names):  # one with a line feed in it
        return [NUMBER.sub("\0", name) for name in names]
    return found


def _numbers(alike: Sequence[Row]) -> list[set[str]]:
    """The digits at each place of names that are alike but for them."""
    places = len(NUMBER.findall(alike[0].fqn))
    digits = NUMBER.findall("\n".join([row[0] for row in alike]))
    return [set(digits[place::places]) for place in range(places)]


def _span(numbers: set[int], text: str) -> str:
    if len(numbers) == 1:
        return text
    low, high = min(numbers), max(numbers)
    dense = high - low + 1 == len(numbers)
    return f"{{{low}..{high}}}" if dense else f"{{{low}..{high}, {len(numbers)} of them}}"


FEW = 3
"""Keys dropped for one reason that are shown one by one."""


def listed(title: str, found: Mapping[str, str]) -> list[str]:
    """A line a key with its reason; many that begin alike and have one reason share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for key, why in found.items():
        alike.setdefault((key.partition(".")[0], why), []).append(key)
    lines = []
    for (head, why), keys in alike.items():
        if len(keys) > FEW:
            lines.append(f"{title}: {keys[0]} and {len(keys) - 1} more of {head}: {why}")
        else:
            lines += [f"{title}: {key}: {why}" for key in keys]
    return lines


def table(rows: Iterable[Row]) -> list[str]:
    """Aligned lines: name, count, shape, kind, fidelity, bytes."""
    folded = fold(rows)
    cells = [
        (
            f"{g.first.role}: {g.pattern}" if g.first.role != "model" else g.pattern,
            f"{g.count}x",
            str(list(g.first.shape)),
            " ".join(g.first.kind),
            g.first.fidelity,
            f"{g.nbytes:,} B",
        )
        for g in folded
    ]
    if not cells:
        return []
    widths = [max(len(row[i]) for row in cells) for i in range(6)]
    return [
        "  "
        + "  ".join(
            cell.rjust(w) if i in (1, 5) else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
