"""Read a box that several pieces tile by columns, as ranks hold a matrix that is cut along its last dim.

    file 0: a0 a1 a2 ...      file 1: b0 b1 b2 ...      ->      a0 b0 a1 b1 a2 b2 ...

Each piece lies row after row in its file. A block of each is read as one run, the blocks are cut
into rows, and the rows are joined in the order of the output: no buffer is made for a row of it, and
the CRC-32 of the record goes over one run, while that is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from ckptmap.core.strided_dims import merge_dims
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, Region, contiguous_strides

MIN_RUN, MAX_RUN = 64, 8 << 10
"""Bytes of a row of a piece: shorter ones are copied faster by elements, longer ones are read where
they belong."""
READ = 128 << 10
"""Bytes of a piece that are read at once; half of it, where many pieces share SCRATCH."""
SCRATCH = 1 << 20
"""Bytes of all pieces that are read before they are joined: they fit in the L2 cache."""
JOINED = 120 << 10
"""Bytes that are joined at once. From 128 KiB on, malloc would take new pages each time."""

Piece: TypeAlias = tuple[Box, Region]
"""A part of a box, relative to it, and the region of a file that fills it."""


class _Column(NamedTuple):
    """Where a row of the output has its part of a piece, and how many bytes it is."""

    start: int
    run: int
    piece: Piece


class _Rows(NamedTuple):
    """Rows of the output: the first, how many there are, and the bytes of each."""

    first: int
    n: int
    step: int


def fill_columns(
    files: Files, pieces: Iterable[Piece], sizes: Sequence[int], out: memoryview
) -> list[Piece]:
    """Fill what pieces tile by columns of `out`, a row-major tensor of `sizes`.

    Return the pieces that do not lie like that: they are not read. Memory beyond `out`: SCRATCH
    and JOINED bytes. Raise as `Files.read_into` does.
    """
    found: dict[_Rows, list[_Column]] = {}
    others = []
    for piece in pieces:
        column = _column_of(piece, sizes)
        if column is None:
            others.append(piece)
        else:
            found.setdefault(column[0], []).append(column[1])
    for rows, beside in found.items():
        beside.sort()
        ends = list(accumulate(column.run for column in beside))
        tile = [0, *ends] == [*(column.start for column in beside), rows.step]
        if tile and rows.step <= len(beside) * MAX_RUN and len(beside) * READ <= 2 * SCRATCH:
            _join(files, rows, beside, out)
        else:
            others += [column.piece for column in beside]
    return others


def _column_of(piece: Piece, sizes: Sequence[int]) -> tuple[_Rows, _Column] | None:
    """Return how a piece is cut by columns; None: it is not, or its rows are too short."""
    place, region = piece
    itemsize = region.itemsize
    strides = contiguous_strides(sizes, itemsize)
    dims = merge_dims(region.sizes, region.strides, strides)
    if len(dims) != 2 or not region.nbytes:
        return None
    row, item = dims
    run = item.n * itemsize
    if not (item.src == item.dst == itemsize and row.src == run >= MIN_RUN):
        return None
    start = sum(o * s for o, s in zip(place.offsets, strides, strict=True))
    rows = _Rows(start // row.dst, row.n, row.dst)
    return rows, _Column(start % row.dst, run, piece)


def _join(files: Files, rows: _Rows, columns: Sequence[_Column], out: memoryview) -> None:
    """Read a block of each column, and join their rows; again, until all rows are there."""
    block = min(rows.n, min(len(columns) * READ, SCRATCH) // rows.step)
    some = max(1, JOINED // rows.step)
    scratch = [memoryview(bytearray(block * column.run)) for column in columns]
    parts: list[memoryview] = [scratch[0]] * (block * len(columns))
    for index, (column, held) in enumerate(zip(columns, scratch, strict=True)):
        run = column.run
        parts[index :: len(columns)] = [held[at : at + run] for at in range(0, held.nbytes, run)]
    for first in range(0, rows.n, block):
        n = min(block, rows.n - first)
        for (_, run, (_, region)), held in zip(columns, scratch, strict=True):
            files.read_into(region.file, region.offset + first * run, [held[: n * run]])
        start = (rows.first + first) * rows.step
        for row in range(0, n, some):
            stop = min(row + some, n)
            joined = b"".join(parts[row * len(columns) : stop * len(columns)])
            out[start + row * rows.step : start + stop * rows.step] = joined
