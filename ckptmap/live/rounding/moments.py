"""Moments in 8 or 4 bits by blocks of the whole tensor, so that they do not depend on the world size.

torchao decides by the shard: one of fewer than 4096 elements, or of no whole number of blocks, is not
quantized, and blocks begin with the shard. Here the whole tensor decides, by the same rule. Where a
parameter is cut by rows inside a block, its ranks hold that block together (see `blocks_around`). Where it is cut
in another way inside blocks, by columns for one, most blocks are shared: ranks agree on their scales in each step (see
`shared_scales`). Only where a rank holds several boxes of a parameter do its moments stay as torchao makes them, and
another number of ranks rounds them otherwise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptmap.live.model.live_tensor import is_dtensor, like
from ckptmap.live.optimizer.family import local_of
from ckptmap.live.rounding.blocks_around import zeros_around, zeros_of_cut
from ckptmap.live.rounding.cut_params import cut_blocks
from ckptmap.live.rounding.positions import every_ranks_boxes, on_grid
from ckptmap.live.rounding.shared_blocks import shared_blocks

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.torchao_adam import TorchaoOptimizer

PLAIN, WHOLE, AROUND, CUT, SHARD = GRIDS = ("plain", "whole", "around", "cut", "shard")
"""Not quantized on any rank; blocks of the whole tensor, shards are whole blocks; blocks of the whole tensor,
ranks share some; ranks share most; blocks of each rank's shard."""
MIN_QUANTIZED = 4096
"""Elements below which torchao does not quantize, as bitsandbytes."""


def grid_of(param: torch.Tensor, block: float) -> str:
    """Return how the moments of a parameter are cut into blocks of `block` elements: one of `GRIDS`."""
    shape = tuple(param.shape)
    numel = math.prod(shape)
    if block == float("inf") or numel < MIN_QUANTIZED or numel % int(block):
        return PLAIN
    if not is_dtensor(param):
        return WHOLE
    mesh = tuple(param.device_mesh.shape)
    if _fits(param, int(block), (shape, mesh, tuple(map(str, param.placements)))):
        return WHOLE
    if shared_blocks(param, int(block)) is not None:
        return AROUND
    return SHARD if cut_blocks(param, int(block)) is None else CUT


_known: dict[object, bool] = {}


def _fits(param: torch.Tensor, block: int, facts: object) -> bool:
    """Return whether all shards of a parameter are whole blocks; looked up where another one is cut alike."""
    key = (facts, block)
    if key not in _known:
        shape = tuple(param.shape)
        _known[key] = all(on_grid(shape, boxes, block) for boxes in every_ranks_boxes(param))
    return _known[key]


def new_buffer(optimizer: TorchaoOptimizer, param: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return zeros for a moment, by the rule of the whole tensor; `optimizer` has torchao's rule."""
    import torch

    grid = grid_of(param, optimizer.block_size)
    if grid == SHARD:
        own: torch.Tensor = type(optimizer)._new_buffer(optimizer, param, signed)
        return own
    local = local_of(param)
    with torch.no_grad():
        if grid == AROUND and local.numel():
            shared = shared_blocks(param, int(optimizer.block_size))
            assert shared is not None
            return zeros_around(optimizer, param, signed, shared.mine).to(param.device)
        if grid == CUT and local.numel():
            cut = cut_blocks(param, int(optimizer.block_size))
            assert cut is not None
            return zeros_of_cut(optimizer, param, signed, cut).to(param.device)
        if grid == WHOLE and local.numel():
            zeros = optimizer._subclass_zeros(local, signed, int(optimizer.block_size))
        else:
            zeros = torch.zeros_like(local)
        made: torch.Tensor = like(param, zeros)
        return made.to(param.device)
