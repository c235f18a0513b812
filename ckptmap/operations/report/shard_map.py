"""Ranks x layers: how many bytes of each layer a rank (or a file) holds, and in which boxes.

The cells cover every byte. Of the boxes, a page of bounded size lists the first of each cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptmap.operations.report.collect import Tensors, shown_name
from ckptmap.operations.shards import ShardsReport, StoredPiece

LISTED = 200_000
"""Boxes that a page lists at most."""
ROWS, COLUMNS = 256, 400
"""Rows and columns at most; consecutive ones share a row or column where there are more."""


@dataclass(frozen=True)
class ShardMap:
    """The map of one checkpoint, in the form that the page's script draws."""

    rows: Sequence[str]
    columns: Sequence[str]
    by_rank: bool
    imbalance: float
    replica_nbytes: int
    data: Mapping[str, object]


Form = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets and sizes of a box, and its bytes."""
V = TypeVar("V")


class _Interned(dict[V, int]):
    """Values by their number, in order of first appearance."""

    def number(self, value: V) -> int:
        return self.setdefault(value, len(self))


def shard_map(shards: ShardsReport, tensors: Tensors) -> ShardMap:
    """Return the map of a checkpoint. Rows are ranks where the files tell them, else files."""
    by_rank = any(share.rank is not None for share in shards.files)
    keys: dict[object, str] = {}
    for share in sorted(shards.files, key=lambda share: (share.rank is None, share.rank or 0)):
        ranked = by_rank and share.rank is not None
        keys[share.rank if ranked else share.file] = (
            f"rank {share.rank}" if ranked else shown_name(share.file)
        )
    row_of, rows = bucketed(list(keys.values()), ROWS)
    column_of, columns = bucketed([shown_name(title) for title in tensors.layers], COLUMNS)
    number = {key: row_of[i] for i, key in enumerate(keys)}
    drawn = _Drawing(tensors, column_of)
    for piece in shards.pieces:
        row = number[piece.rank if by_rank and piece.rank is not None else piece.file]
        drawn.add(piece, row)
    data = {"rows": rows, "columns": columns, **drawn.to_json()}
    return ShardMap(
        rows, columns, by_rank, shards.imbalance,
        sum(piece.nbytes for piece in shards.pieces if piece.replica), data,
    )  # fmt: skip


class _Drawing:
    """Collects the cells, and the boxes in them."""

    def __init__(self, tensors: Tensors, column_of: Sequence[int]) -> None:
        self._numbers, self._layer_of, self._column_of = (
            tensors.numbers, tensors.layer_of, column_of,
        )  # fmt: skip
        self._cells: dict[tuple[int, int], list[int]] = {}
        self._boxes: dict[tuple[int, int], list[tuple[int, int, int, int, int, int]]] = {}
        self._files, self._parts = _Interned[str](), _Interned[str]()
        self._forms = _Interned[Form]()

    def add(self, piece: StoredPiece, row: int) -> None:
        tensor = self._numbers[piece.role, piece.fqn]
        at = (row, self._column_of[self._layer_of[tensor]])
        cell = self._cells.setdefault(at, [0, 0, 0])
        cell[0] += piece.nbytes
        cell[1] += piece.nbytes if piece.replica else 0
        cell[2] += 1
        self._boxes.setdefault(at, []).append(
            (
                tensor,
                self._parts.number(piece.part),
                self._files.number(piece.file),
                self._forms.number((piece.box_offsets, piece.box_sizes, piece.nbytes)),
                piece.offset,
                int(piece.replica),
            )
        )

    def to_json(self) -> dict[str, object]:
        kept = _evenly([len(boxes) for boxes in self._boxes.values()], LISTED)
        listed = [row for boxes in self._boxes.values() for row in boxes[:kept]]
        cells = [(*at, *cell) for at, cell in self._cells.items()]
        counts = [min(len(boxes), kept) for boxes in self._boxes.values()]
        return {
            "cells": [list(column) for column in zip(*cells, strict=True)],
            "listed": counts,
            "boxes": [list(column) for column in zip(*listed, strict=True)],
            "forms": [[list(offsets), list(sizes), n] for offsets, sizes, n in self._forms],
            "files": [shown_name(file) for file in self._files],
            "parts": [shown_name(part) for part in self._parts],
        }


def _evenly(counts: Sequence[int], total: int) -> int:
    """Return how many items of each cell can be kept, so that all are at most `total`."""
    kept = max(counts, default=0)
    while kept > 1 and sum(min(count, kept) for count in counts) > total:
        kept //= 2
    return kept


def bucketed(titles: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Return the place of each title, and the titles of the places: at most `most` of them."""
    width = -(-len(titles) // most) if titles else 1
    if width == 1:
        return list(range(len(titles))), list(titles)
    starts = range(0, len(titles), width)
    ends = [min(start + width, len(titles)) - 1 for start in starts]
    joined = [f"{titles[a]} to {titles[b]}" for a, b in zip(starts, ends, strict=True)]
    return [i // width for i in range(len(titles))], joined
