"""Scales in the order in which Blackwell's matrix multiplication reads them, and back.

    scales [.., rows, columns]  ->  [.., ceil(rows / 128) * 32, ceil(columns / 4) * 16]

Each tile of 128 x 4 scales is 512 bytes: row r, column c of it is at (r % 32) * 16 + (r // 32) * 4 + c. Source:
cuBLAS, "1D block scaling factors layout"; torchao 0.18, prototype/mx_formats/utils.py (`to_blocked`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

ROWS, COLUMNS = 128, 4
_STORED_ROWS, _STORED_COLUMNS = 32, 16


def stored_shape(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stored shape of a grid of scales."""
    *lead, rows, columns = grid
    return (*lead, -(-rows // ROWS) * _STORED_ROWS, -(-columns // COLUMNS) * _STORED_COLUMNS)


def stored_box(grid: Box, stored: tuple[int, ...]) -> Box:
    """Return the stored rows that hold a box of the grid; empty for an empty box."""
    if not grid.numel:
        return Box((0,) * len(stored), (0,) * len(stored))
    *lead, row, _ = grid.offsets
    *sizes, rows, _ = grid.sizes
    first, last = row // ROWS, -(-(row + rows) // ROWS)
    return Box(
        (*lead, first * _STORED_ROWS, 0), (*sizes, (last - first) * _STORED_ROWS, stored[-1])
    )


def in_order(stored: torch.Tensor, grid: Box) -> torch.Tensor:
    """Return a box of the grid, from the rows that `stored_box` names; scales of one byte."""
    import torch

    *lead, rows, columns = stored.shape
    tiles = rows // _STORED_ROWS, columns // _STORED_COLUMNS
    apart = stored.view(torch.uint8).reshape(*lead, *tiles, 32, 4, 4)
    tiled = apart.transpose(-3, -2).reshape(*lead, *tiles, ROWS, COLUMNS)
    plain = tiled.transpose(-3, -2).reshape(*lead, tiles[0] * ROWS, tiles[1] * COLUMNS)
    skip = grid.offsets[-2] % ROWS
    cut = plain.narrow(-2, skip, grid.sizes[-2]).narrow(-1, grid.offsets[-1], grid.sizes[-1])
    return cut.contiguous().view(stored.dtype)
