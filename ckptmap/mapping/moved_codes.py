"""Where codes go when a tensor is transposed, cut or stacked and every block of codes stays whole.

    experts.gate_up_proj [e, in, (f two)], blocks along `in`  ->  experts.3.gate_proj.weight [f, in]
    codes u8 [e, 2 f, in / 2]                                 ->  codes u8 [f, in / 2]

Codes have one dim for each dim of their tensor, perhaps in another order (`CodeGrid.axes`), and the last may hold
several elements in one entry. An axis along which blocks have several elements must take them whole and in order;
every other axis may go anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.strided_boxes import Piece, StridedBox
from ckptmap.tensors import TensorInfo


@dataclass(frozen=True)
class Tiling:
    """The elements that belong together along each dim of a tensor.

    units  elements in one entry of the codes
    tiles  elements in one block, a multiple of that
    axes   the dim of the tensor along which each dim of the codes runs
    """

    units: tuple[int, ...]
    tiles: tuple[int, ...]
    axes: tuple[int, ...]


def tiling_of(grid: CodeGrid, shape: Sequence[int]) -> Tiling | None:
    """Return the tiling of a tensor by its codes; None where they are flat."""
    ndim = len(shape)
    if len(grid.codes.shape) != ndim or not all(shape):
        return None
    axes = grid.axes or tuple(range(ndim))
    units, tiles = [1] * ndim, [1] * ndim
    for dim, count, block in zip(axes, grid.codes.shape, grid.block, strict=True):
        units[dim] = shape[dim] // count
        if units[dim] * count != shape[dim]:
            return None
        tiles[dim] = units[dim] * block
    return Tiling(tuple(units), tuple(tiles), axes)


class MovedCodes(NamedTuple):
    """The grid of a tensor that is made of others, and the pieces of its codes and of its scales."""

    grid: CodeGrid
    codes: Sequence[Piece]
    scales: Sequence[Piece]


def by_blocks(
    grids: Mapping[str, CodeGrid], infos: Mapping[str, TensorInfo], pieces: Sequence[Piece],
    info: TensorInfo,
) -> MovedCodes | None:  # fmt: skip
    """Return the codes of the tensor `info` that pieces make of these sources.

    None where a block would be split, or the sources have codes of several kinds.
    """
    kinds = {(grid.name, grid.codes.dtype, grid.values) for grid in grids.values()}
    tilings = {key: tiling_of(grid, infos[key].shape) for key, grid in grids.items()}
    there = _target([(piece, tilings[piece.source]) for piece in pieces], info.shape)
    if there is None or len(kinds) != 1:
        return None
    name, dtype, values = kinds.pop()
    codes, scales = [], []
    for piece in pieces:
        here = tilings[piece.source]
        assert here is not None, "the target has a tiling"
        codes.append(_entries(piece, here, there, here.units, there.units))
        scales.append(_entries(piece, here, there, here.tiles, there.tiles))
    shape = tuple(info.shape[dim] // there.units[dim] for dim in there.axes)
    block = tuple(there.tiles[dim] // there.units[dim] for dim in there.axes)
    axes = () if there.axes == tuple(range(len(info.shape))) else there.axes
    return MovedCodes(CodeGrid(name, TensorInfo(shape, dtype), block, values, axes), codes, scales)


def _target(pieces: Sequence[tuple[Piece, Tiling | None]], shape: tuple[int, ...]) -> Tiling | None:
    """Return the tiling of a tensor by that of its pieces; None where they do not agree on one."""
    found = {
        None if tiling is None else _tiles(piece, tiling, len(shape)) for piece, tiling in pieces
    }
    one = found.pop() if len(found) == 1 else None
    tiling = None if one is None else _ordered(*one)
    if tiling is None or any(n % tile for n, tile in zip(shape, tiling.tiles, strict=True)):
        return None
    return tiling


def _tiles(
    piece: Piece, tiling: Tiling, ndim: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (units, tiles) along the dims of the target, None where a piece splits a block."""
    units, tiles, whole = [1] * ndim, [1] * ndim, set()
    src, dst = piece.src, piece.dst
    axes = list(zip(src.sizes, src.dims, src.steps, dst.dims, dst.steps, strict=True))
    for n, sd, ss, dd, ds in axes:
        if tiling.tiles[sd] > 1 and (ss, ds) == (1, 1):
            if n % tiling.tiles[sd] or tiles[dd] > 1:
                return None
            units[dd], tiles[dd] = tiling.units[sd], tiling.tiles[sd]
            whole.add((sd, dd))
    for _, sd, ss, dd, ds in axes:
        is_inner = (sd, dd) in whole and (ss, ds) == (1, 1)
        if not is_inner and (ss % tiling.tiles[sd] or ds % tiles[dd]):
            return None
    torn = any(at % tile for at, tile in zip(src.offsets, tiling.tiles, strict=True))
    torn |= any(at % tile for at, tile in zip(dst.offsets, tiles, strict=True))
    if torn or {sd for sd, _ in whole} != {k for k, tile in enumerate(tiling.tiles) if tile > 1}:
        return None
    return tuple(units), tuple(tiles)


def _ordered(units: tuple[int, ...], tiles: tuple[int, ...]) -> Tiling | None:
    """Return the tiling with the order of the codes' dims: one that is packed is the last."""
    dims = tuple(range(len(units)))
    packed = [dim for dim in dims if units[dim] > 1]
    if not packed or packed == [dims[-1]]:
        return Tiling(units, tiles, dims)
    if packed == [dims[-1] - 1]:
        return Tiling(units, tiles, (*dims[:-2], dims[-1], dims[-2]))
    return None


def _entries(
    piece: Piece, here: Tiling, there: Tiling, ours: Sequence[int], theirs: Sequence[int]
) -> Piece:
    """Return the same piece in entries of so many elements along each dim of the source and the target."""
    counts = tuple(
        n // ours[dim] if step == 1 else n
        for n, dim, step in zip(piece.src.sizes, piece.src.dims, piece.src.steps, strict=True)
    )
    return Piece(
        piece.source,
        _scaled(piece.src, counts, ours, here.axes),
        _scaled(piece.dst, counts, theirs, there.axes),
    ).tidy()


def _scaled(
    box: StridedBox, counts: tuple[int, ...], sizes: Sequence[int], axes: Sequence[int]
) -> StridedBox:
    """Return the box in entries of `sizes` elements, its dims in the order of `axes`."""
    place = {dim: k for k, dim in enumerate(axes)}
    return StridedBox(
        tuple(box.offsets[dim] // sizes[dim] for dim in axes),
        counts,
        tuple(place[dim] for dim in box.dims),
        tuple(
            step if step == 1 else step // sizes[dim]
            for dim, step in zip(box.dims, box.steps, strict=True)
        ),
    )
