"""Many keys in few lines: rows that differ only in a layer number are shown once, with the range.

model.layers.{0..31}.self_attn.q_proj.weight  32x [4096, 4096] bfloat16 -> nf4
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")


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
    found: dict[tuple[object, ...], Folded] = {}
    split = NUMBER.split
    for row in rows:
        words = split(row[0])  # text and numbers in turn
        key = (*words[::2], *row[1:5])
        group = found.get(key)
        if group is None:
            found[key] = Folded(row, 1, row[5], [{number} for number in words[1::2]])
            continue
        group.count += 1
        group.nbytes += row[5]
        for seen, number in zip(group.numbers, words[1::2], strict=True):
            seen.add(number)
    return list(found.values())


def _span(numbers: set[int], text: str) -> str:
    if len(numbers) == 1:
        return text
    low, high = min(numbers), max(numbers)
    dense = high - low + 1 == len(numbers)
    return f"{{{low}..{high}}}" if dense else f"{{{low}..{high}, {len(numbers)} of them}}"


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
