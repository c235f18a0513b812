"""Moments in 8 or 4 bits by blocks of the whole tensor, so that they do not depend on the world size.

torchao decides by the shard: one of fewer than 4096 elements, or of no whole number of blocks, is not
quantized, and blocks begin with the shard. Here the whole tensor decides, by the same rule, wherever
every rank's shard is whole blocks of it. Elsewhere torchao's layout has no place for a part of a block,
and the moments stay as torchao makes them: by shard, another number of ranks rounds them otherwise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptmap.live.model.live_tensor import is_dtensor, like
from ckptmap.live.optimizer.family import codes_of, local_of
from ckptmap.live.rounding.positions import every_ranks_boxes, on_grid

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.torchao_adam import TorchaoOptimizer

PLAIN, WHOLE, SHARD = GRIDS = ("plain", "whole", "shard")
"""Not quantized on any rank; blocks of the whole tensor; blocks of each rank's shard."""
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
    return _grid_of_cut(param, int(block), (shape, mesh, tuple(map(str, param.placements))))


_known: dict[object, str] = {}


def _grid_of_cut(param: torch.Tensor, block: int, facts: object) -> str:
    """Return the grid of a parameter that a mesh cuts; looked up where another one is cut alike."""
    key = (facts, block)
    if key not in _known:
        shape = tuple(param.shape)
        fits = all(on_grid(shape, boxes, block) for boxes in every_ranks_boxes(param))
        _known[key] = WHOLE if fits else SHARD
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
        if grid == WHOLE and local.numel():
            zeros = optimizer._subclass_zeros(local, signed, int(optimizer.block_size))
        else:
            zeros = torch.zeros_like(local)
        made: torch.Tensor = like(param, zeros)
        return made.to(param.device)


def is_by_grid(moment: torch.Tensor, param: torch.Tensor, grid: str) -> bool:
    """Return whether a moment of this rank is quantized where its grid says so, and only there."""
    return not local_of(param).numel() or (codes_of(moment) is not None) == (grid == WHOLE)
