"""Compute how many rows of a tensor a rearrangement keeps together, and move codes and scales by them.

Permuting attention heads moves blocks of head_dim rows. If a quantized tensor's blocks do not cross
these rows, its codes and scales can be moved as bytes: each part has a fixed number of rows per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from ckptmap.core.strided_boxes import Piece, StridedBox
from ckptmap.mapping.resolve import MappedTensor


def rows_together(mapped: MappedTensor) -> int | None:
    """Return the number of rows that stay together in every piece, None where a row is split."""
    units = [_unit_of(piece, mapped.info.shape) for piece in mapped.pieces]
    whole = [unit for unit in units if unit is not None]
    return gcd(*whole) if whole and len(whole) == len(units) else None


def _unit_of(piece: Piece, shape: Sequence[int]) -> int | None:
    src, dst = piece.src, piece.dst
    inner, rows = 1, 1
    steps = []
    for n, sd, ss, dd, ds in zip(src.sizes, src.dims, src.steps, dst.dims, dst.steps, strict=True):
        if sd != dd:
            return None
        if sd:
            if (ss, ds) != (1, 1):
                return None
            inner *= n
        elif (ss, ds) == (1, 1):
            rows = n
        else:
            steps += [ss, ds]
    if inner != prod(shape[1:]) or any(src.offsets[1:]) or any(dst.offsets[1:]):
        return None
    torn = any(step % rows for step in (*steps, src.offsets[0], dst.offsets[0]))
    return 1 if torn else rows


def part_piece(piece: Piece, unit: int, rows: int, shape: Sequence[int]) -> Piece:
    """Return the piece for a part of the tensor that has `rows` rows per `unit` rows of the tensor."""
    inner = [(n, dim, 1) for dim, n in enumerate(shape[1:], 1)]

    def part(strided: StridedBox) -> StridedBox:
        outer = []
        for n, dim, step in zip(strided.sizes, strided.dims, strided.steps, strict=True):
            if dim == 0 and step == 1 and unit > 1:
                outer.append((n // unit, 0, rows))
            elif dim == 0:
                outer.append((n, 0, step // unit * rows))
        axes = [*outer, (rows, 0, 1), *inner]
        return StridedBox(
            (strided.offsets[0] // unit * rows, *(0 for _ in shape[1:])),
            tuple(axis[0] for axis in axes),
            tuple(axis[1] for axis in axes),
            tuple(axis[2] for axis in axes),
        )

    return Piece(piece.source, part(piece.src), part(piece.dst)).tidy()
