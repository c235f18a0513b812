"""The codes of a block of ggml, apart from its scale: other forms of the same grid take them as they are.

    Q8_0               ->  int8    i8 [n, 32], a scale a block
    Q5_0, Q4_0         ->  int5, int4    i8 [n, 32], less 16 and 8
    MXFP4              ->  e2m1    u8 [n, 16], the even element of two in the low half; the scale is a power of
                           two, and the code of -0 means 0

Types with a minimum beside the scale (Q4_1, Q5_1, K-quants) have no grid that others have: it is no multiple of the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.formats.gguf.block_types import BY_NAME
from ckptmap.quantization.blockwise.scaled_encoding import PRODUCTS
from ckptmap.quantization.gguf import small_blocks
from ckptmap.quantization.gguf.bits import halves, nibbles
from ckptmap.quantization.microscaling.packed_fp4 import POSITIVE_ZEROS
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch


class TypeGrid(NamedTuple):
    """The grid of a type: its name, how values follow, and how many of them are in one entry of the codes."""

    name: str
    values: str
    packed: int = 1


GRIDS = {
    "Q8_0": TypeGrid("int8", PRODUCTS),
    "Q5_0": TypeGrid("int5", PRODUCTS),
    "Q4_0": TypeGrid("int4", PRODUCTS),
    "MXFP4": TypeGrid("e2m1", POSITIVE_ZEROS, 2),
}


def grid_of(kind: str, shape: Sequence[int]) -> CodeGrid | None:
    """Return the grid of a tensor of this type; None: no other form has it."""
    grid = GRIDS.get(kind)
    if grid is None:
        return None
    *rows, width = shape
    codes = TensorInfo((*rows, width // grid.packed), "int8" if grid.packed == 1 else "uint8")
    block = (*(1 for _ in rows), BY_NAME[kind].numel // grid.packed)
    return CodeGrid(grid.name, codes, block, grid.values)


def codes_of(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of blocks u8 [n, bytes of a block], in the order of the values: [n, entries of a block]."""
    import torch

    if kind == "Q8_0":
        return blocks[:, 2:].view(torch.int8)
    if kind == "Q5_0":
        return small_blocks.five_bits(blocks[:, 2:6], blocks[:, 6:]).view(torch.int8) - 16
    if kind == "Q4_0":
        return nibbles(blocks[:, 2:], 16).flatten(1).view(torch.int8) - 8
    single = nibbles(blocks[:, 1:], 16).flatten(1)
    return single[:, 0::2] | single[:, 1::2] << 4


def scales_of(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks u8 [n, bytes of a block]: f32 [n, 1]."""
    return small_blocks.powers(blocks) if kind == "MXFP4" else halves(blocks, 0)
