"""Compare thousands of pieces of a pickle at once, which differ only in numbers of four bytes.

    r\\1\\0\\0\\0 t r\\2\\0\\0\\0 R      width 12, numbers at 1 and 7
    r\\9\\0\\0\\0 t r\\10\\0\\0\\0 R     the same form: the bytes outside of the numbers are equal

The pieces are entries of a state dict, the numbers are memo indices and lengths. Opcodes are read
from left to right, and none of these numbers changes the length of an opcode. So a piece of the same form holds the same opcodes, and its numbers are at the same offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from struct import error, pack

Places = tuple[int, ...]


@dataclass(frozen=True)
class PieceGroup:
    """Pieces of the same width that have numbers at the same offsets."""

    indices: Sequence[int]
    """Indices of the pieces, ascending."""
    forms: Sequence[bytes]
    """Each piece with its numbers set to 0."""
    numbers: Sequence[tuple[bytes, ...]]
    """For each offset, four columns: byte 0 (the lowest) to byte 3 of the number in each piece."""

    def of(self, values: Sequence[int]) -> Sequence[int]:
        """Return the values of these pieces, from the values of all pieces."""
        if len(self.indices) == len(values):
            return values
        return [values[i] for i in self.indices]

    def hold_numbers(self, place: int, numbers: Iterable[int]) -> bool:
        """Return True if the numbers at offset number `place` are `numbers`."""
        try:
            packed = pack(f"<{len(self.indices)}I", *numbers)
        except error:  # one of `numbers` has no four bytes: a damaged pickle makes any of it
            return False
        return all(column == packed[i::4] for i, column in enumerate(self.numbers[place]))


def group_pieces(
    pieces: Sequence[bytes], places_of: Callable[[bytes], Places], most: int
) -> list[PieceGroup] | None:
    """Group pieces by width and offsets of numbers; `places_of(piece)` returns the offsets.

    Return None if there are more than `most` groups or forms.
    """
    widths = list(map(len, pieces))
    groups: list[PieceGroup] = []
    forms = 0
    left: list[Sequence[int]] = [range(len(pieces))]
    if len(set(widths)) > 1:
        by_width: dict[int, list[int]] = {}
        for index, width in enumerate(widths):
            by_width.setdefault(width, []).append(index)
        left = list(by_width.values())
    while left:
        indices = left.pop()
        places = places_of(pieces[indices[0]])
        mine = [pieces[i] for i in indices]
        group = _blanked(indices, mine, places)
        first = dict(zip(reversed(group.forms), reversed(mine), strict=True))
        forms += len(first)
        if forms > most or len(groups) + len(left) > most:
            return None
        others = {form for form, piece in first.items() if places_of(piece) != places}
        if others:
            pairs = list(zip(indices, group.forms, strict=True))
            left += [[i for i, form in pairs if form in others]]
            left += [[i for i, form in pairs if form not in others]]
            forms -= len(first)
        else:
            groups.append(group)
    return groups


def _blanked(indices: Sequence[int], pieces: Sequence[bytes], places: Places) -> PieceGroup:
    rows, width = bytearray(b"".join(pieces)), len(pieces[0])
    none, numbers = bytes(len(pieces)), []
    for place in places:
        spans = [slice(place + i, None, width) for i in range(4)]
        numbers.append(tuple([bytes(rows[span]) for span in spans]))
        for span in spans:
            rows[span] = none
    text = bytes(rows)
    return PieceGroup(indices, [text[i : i + width] for i in range(0, len(text), width)], numbers)
