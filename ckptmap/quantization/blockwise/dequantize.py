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

from ckptmap.quantization.blockwise.chunks import chunk_numel, constant
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

CHUNK_NUMEL = 256 * 1024
"""Elements at a time on a CPU: larger temporaries leave the cache and pay page faults."""


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    box: Box,
    block: Sequence[int],
    out: torch.Tensor,
    factor: float = 1.0,
    rounded: torch.dtype | None = None,
    divides: bool = False,
) -> None:
    """Fill `out` [box.sizes] T with the values of a box.

    `codes` is that box of the codes; `scale` and `zero` are the box `grid_box(box, block)` of their
    grids. `factor` is multiplied last, in fp32. The product is rounded to the dtype `rounded` first, if given.
    With `divides` values are divided by their scales.
    """
    if not box.numel:
        return
    scales = _Grid(scale, box, block)
    zeros = None if zero is None else _Grid(zero, box, block)
    most = chunk_numel(out.device, CHUNK_NUMEL)
    for inner in row_major_boxes(Box.whole(box.sizes), most):
        part = window(out, inner)
        shift = None if zeros is None else zeros.spread(inner)
        values = _shifted(window(codes, inner), shift, out.dtype)
        (scales.divide if divides else scales.multiply)(values, inner)
        product = values if factor == 1.0 else values.mul_(factor)
        part.copy_(product if rounded is None else product.to(rounded))


def window(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a tensor at a box."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _shifted(codes: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return codes - zero as a new fp32 tensor."""
    import torch

    if zero is None:
        return _widened(codes)
    if zero.dtype.is_floating_point:
        return (codes.to(dtype) - zero.to(dtype)).to(torch.float32).contiguous()
    return _widened(codes).sub_(zero.to(torch.float32))


def _widened(codes: torch.Tensor) -> torch.Tensor:
    """Return codes as a new fp32 tensor, contiguous.

    Float8 is looked up on a CPU: torch converts it element by element, which takes five times as long.
    """
    import torch

    if not codes.is_cpu or not codes.is_floating_point():
        wide = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        return wide.copy_(codes)

    def made() -> torch.Tensor:
        every = torch.arange(256, dtype=torch.uint8, device="cpu")
        return every.view(codes.dtype).to(torch.float32)

    table = constant(("float8 values", codes.dtype), codes.device, made)
    index = codes.view(torch.uint8).reshape(-1).to(torch.int32)
    return table.index_select(0, index).view(codes.shape)


class _Grid:
    """A grid of scales or zero points, the box `grid_box(box, block)` of it."""

    def __init__(self, grid: torch.Tensor, box: Box, block: Sequence[int]) -> None:
        import torch

        self._grid, self._box, self._block = grid, box, block
        self._blocks: dict[int, torch.Tensor] = {}
        """By dim: the block of each row or column of the box, counted from the grid's first."""
        for dim, size in enumerate(block):
            if size > 1 and grid.shape[dim] > 1:
                start = box.offsets[dim] % size
                at = torch.arange(start, start + box.sizes[dim], device=grid.device)
                self._blocks[dim] = at.floor_divide_(size)

    def multiply(self, values: torch.Tensor, inner: Box) -> None:
        """Multiply contiguous values of `inner` (relative to the box) by their scales.

        Whole blocks of a row take their scale as it is, which saves a scale for each element.
        """
        size, count = self._block[-1], inner.sizes[-1]
        start = self._box.offsets[-1] + inner.offsets[-1]
        if start % size or count % size or count == size:
            values.mul_(self.spread(inner))
            return
        blocks = values.view(*inner.sizes[:-1], count // size, size)
        blocks.mul_(self.spread(inner, by_block=True).unsqueeze(-1))

    def divide(self, values: torch.Tensor, inner: Box) -> None:
        """Divide values of `inner` (relative to the box) by their scales."""
        values.div_(self.spread(inner))

    def spread(self, inner: Box, by_block: bool = False) -> torch.Tensor:
        """Return the scales for `inner` (relative to the box), in a shape that broadcasts against it.

        `by_block`: against the blocks of its rows.
        """
        grid = self._grid
        for dim, (offset, count) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
            low, high = self._touched(dim, offset, count)
            kept = by_block and dim == len(inner.sizes) - 1
            if not kept and self._block[dim] > 1 and high - low > 1:
                grid = grid.index_select(dim, self._blocks[dim].narrow(0, offset, count))
            else:
                grid = grid.narrow(dim, low, high - low)
        return grid

    def _touched(self, dim: int, offset: int, count: int) -> tuple[int, int]:
        """Return the first and last + 1 of the blocks of a range of the box, within the grid."""
        size, start = self._block[dim], self._box.offsets[dim]
        first = start // size
        return (start + offset) // size - first, -(-(start + offset + count) // size) - first
