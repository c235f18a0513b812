"""Compute values from 8-bit codes and the scales of their blocks.

    codes [a, b] i8 or fp8, scale [ceil(a/p), ceil(b/q)] -> (codes - zero) * scale, rounded to T once

The product of an 8-bit code and a scale is taken in fp32 and rounded to T. Where the scale has dtype T,
the product of the two is exact in fp32, so the result is bit-equal to multiplying in T. It therefore
equals torchao (`dequantize_affine`, `_dequantize_affine_float8`), compressed-tensors (`dequantize`) and
transformers (`Fp8Dequantize`), whatever dtype they multiply in. Subtracting an integer zero point is
exact in fp32; a floating zero point is subtracted in T, as these libraries do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

CHUNK_NUMEL = 256 * 1024
"""Elements at a time: larger temporaries leave the cache and pay page faults."""


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    box: Box,
    block: Sequence[int],
    out: torch.Tensor,
    factor: float = 1.0,
) -> None:
    """Fill `out` [box.sizes] T with the values of a box.

    `codes` is that box of the codes; `scale` and `zero` are the box `grid_box(box, block)` of their
    grids. `factor` is multiplied last, in fp32.
    """
    if not box.numel:
        return
    for inner in row_major_boxes(Box.whole(box.sizes), CHUNK_NUMEL):
        part = window(out, inner)
        spread = _spread(scale, box, inner, block)
        shift = None if zero is None else _spread(zero, box, inner, block)
        values = _shifted(window(codes, inner), shift, out.dtype).mul_(spread)
        part.copy_(values if factor == 1.0 else values.mul_(factor))


def window(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a tensor at a box."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _shifted(codes: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return codes - zero as a new fp32 tensor."""
    import torch

    if zero is None:
        return codes.to(torch.float32, copy=True)
    if zero.dtype.is_floating_point:
        return (codes.to(dtype) - zero.to(dtype)).to(torch.float32)
    return codes.to(torch.float32, copy=True).sub_(zero.to(torch.float32))


def _spread(grid: torch.Tensor, box: Box, inner: Box, block: Sequence[int]) -> torch.Tensor:
    """Return the scales for `inner` (relative to the box), in a shape that broadcasts against it."""
    for dim, size in enumerate(block):
        first = box.offsets[dim] // size
        start = box.offsets[dim] + inner.offsets[dim]
        low, high = start // size - first, -(-(start + inner.sizes[dim]) // size) - first
        grid = grid.narrow(dim, low, high - low)
        if size > 1 and high - low > 1:
            grid = _repeated(grid, dim, start % size, inner.sizes[dim], size)
    return grid


def _repeated(grid: torch.Tensor, dim: int, within: int, count: int, size: int) -> torch.Tensor:
    import torch

    index = torch.arange(within, within + count, device=grid.device) // size
    return grid.index_select(dim, index)
