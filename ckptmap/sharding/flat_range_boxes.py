"""Describe a range of flat elements of a tensor as boxes: FSDP1 cuts flat parameters into ranges.

Elements [start, stop) of a matrix that do not begin and end on rows are up to three boxes: the end
of the first row, whole rows, and the start of the last row.

    [4, 5], 3..17   . . . a a      a: [0, 3] + [1, 2] from 3
                    b b b b b      b: [1, 0] + [2, 5] from 5
                    b b b b b
                    c c . . .      c: [3, 0] + [1, 2] from 15
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptmap.tensors import Box, Region


@dataclass(frozen=True, slots=True)
class InUnit:
    """The storage of a tensor that lies in a flat parameter, from flat element `offset` on; `unit`
    is the key of the flat parameter, `first` the region of its first shard."""

    unit: str
    first: Region
    offset: int


@dataclass(frozen=True, slots=True)
class Slices:
    """The storage of a tensor that ranks hold flat slices of: storage and numel of each rank's slice."""

    shares: tuple[object, ...]
    counts: tuple[int, ...]


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield (box, flat element at which it begins) in row-major order, at most 2 * ndim - 1 of them.

    Each box is contiguous in the flat tensor; together they hold the elements [start, stop).
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ()), 0
        return
    inner = math.prod(shape[1:])
    row, last = -(-start // inner), stop // inner
    if row > last:  # inside one row
        yield from _in_row(shape, last, start - last * inner, stop - last * inner)
        return
    yield from _in_row(
        shape, row - 1, start - (row - 1) * inner, inner if row * inner > start else 0
    )
    if row < last:
        zeros = (0,) * (len(shape) - 1)
        yield Box((row, *zeros), (last - row, *shape[1:])), row * inner
    yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of one row, in the coordinates of the whole tensor."""
    inner = math.prod(shape[1:])
    for box, at in rectangles(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes)), row * inner + at
