"""Convert boxes of a tensor to boxes of its grid of scales, and tell how the grid is stored.

A tensor [a, b] in blocks (p, q) has a grid of ceil(a/p) x ceil(b/q) scales; the last block of a dim may
be short. Formats store the grid as it is, or without its trailing dims of one ([out, 1] as [out]), or,
where it is a single scale, as [1] or [].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

Block = tuple[int, ...]


def clamped(block: Sequence[int], shape: Sequence[int]) -> Block:
    """Return the block cut to the shape, so that (1, 8192) and (1, 4096) are equal for 4096 columns."""
    return tuple(max(1, min(b, n)) for b, n in zip(block, shape, strict=True))


def per_row(shape: Sequence[int]) -> Block:
    """Return the block of one scale per row, that is all of the last dim."""
    return (*(1 for _ in shape[:-1]), max(1, shape[-1])) if shape else ()


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each dim."""
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def grid_box(box: Box, block: Sequence[int]) -> Box:
    """Return the box of the grid with the scales of all blocks that a box touches; empty for an empty box."""
    if not box.numel:
        return Box((0,) * len(box.sizes), (0,) * len(box.sizes))
    offsets = tuple(o // b for o, b in zip(box.offsets, block, strict=True))
    ends = (-(-(o + n) // b) for o, n, b in zip(box.offsets, box.sizes, block, strict=True))
    return Box(offsets, tuple(end - o for o, end in zip(offsets, ends, strict=True)))


def cuts(fine: Block, coarse: Block, shape: Sequence[int]) -> bool:
    """Return whether each block of the first kind lies in one of the second."""
    return all(
        large % small == 0 or large >= n
        for small, large, n in zip(fine, coarse, shape, strict=True)
    )


def spread(scales: torch.Tensor, coarse: Block, fine: Block, shape: Sequence[int]) -> torch.Tensor:
    """Return the scales of blocks that are cut: each fine block has the scale of the one it lies in."""
    for dim, (large, small, n) in enumerate(zip(coarse, fine, shape, strict=True)):
        if large != small:
            times = -(-min(large, n) // small)
            scales = scales.repeat_interleave(times, dim).narrow(dim, 0, -(-n // small))
    return scales


def fits(stored: Sequence[int], grid: Sequence[int]) -> bool:
    """Return whether a stored shape is one of the ways to store a grid."""
    if math.prod(stored) == math.prod(grid) == 1:
        return True
    kept = len(stored)
    return tuple(stored) == tuple(grid[:kept]) and all(n == 1 for n in grid[kept:])


def stored_box(box: Box, stored: Sequence[int]) -> Box:
    """Return a box of the grid in the coordinates of the stored shape."""
    if math.prod(stored) == 1:
        return Box((0,) * len(stored), tuple(min(1, box.numel) for _ in stored))
    kept = len(stored)
    if not box.numel:
        return Box((0,) * kept, (0,) * kept)
    return Box(box.offsets[:kept], box.sizes[:kept])


def as_grid(part: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a stored box of scales in the shape of its box of the grid."""
    return part.reshape(box.sizes)


def reshaped(stored: StoredTensor, shape: Sequence[int]) -> StoredTensor:
    """Return the same bytes with trailing dims of one added or removed: [out] as [out, 1]."""
    if stored.info.shape == tuple(shape):
        return stored
    info = TensorInfo(tuple(shape), stored.info.dtype)
    if not stored.info.shape or math.prod(shape) == 1:
        return StoredTensor(info, lambda: [_single(c, shape) for c in stored.chunks],
                            [_single(c, shape) for c in stored.replicas], stored.share)  # fmt: skip
    return StoredTensor(info, lambda: [_padded(c, len(shape)) for c in stored.chunks],
                        [_padded(c, len(shape)) for c in stored.replicas], stored.share)  # fmt: skip


def _single(chunk: Chunk, shape: Sequence[int]) -> Chunk:
    region = Region.contiguous(chunk.region.file, chunk.region.offset, shape, chunk.region.itemsize)
    return Chunk(Box.whole(tuple(shape)), region, chunk.crc32)


def _padded(chunk: Chunk, ndim: int) -> Chunk:
    more = ndim - len(chunk.box.sizes)
    old = chunk.region
    ones = (1,) * more
    region = Region(
        old.file, old.offset, (*old.sizes, *ones)[:ndim],
        (*old.strides, *(old.itemsize for _ in ones))[:ndim], old.itemsize,
    )  # fmt: skip
    offsets = (*chunk.box.offsets, *(0 for _ in ones))[:ndim]
    return Chunk(Box(offsets, region.sizes), region, chunk.crc32)
