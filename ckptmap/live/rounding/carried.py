"""Are the moments of a checkpoint those that a run on any number of ranks would have?"""

from __future__ import annotations

from dataclasses import replace

from ckptmap.live.model.live_tensor import LiveTensor, local_boxes
from ckptmap.live.optimizer.code_blocks import code_places
from ckptmap.live.optimizer.family import Codes, OptimizerParam, codes_of
from ckptmap.live.rounding.moments import AROUND, PLAIN, WHOLE, grid_of
from ckptmap.live.rounding.record import record_of
from ckptmap.live.rounding.shared_blocks import shared_blocks
from ckptmap.optim.lowbit import LowBit
from ckptmap.storage.lazy_tensor import LazyTensor


def has_other_blocks(part: OptimizerParam, target: LiveTensor, name: str, lazy: LazyTensor) -> bool:
    """Return whether a saved moment is not in the blocks of the whole tensor, or this rank cannot take its
    shard of them as they are. Without rounding by position: no."""
    if record_of(part.optimizer) is None or lazy.shape != tuple(target.tensor.shape):
        return False
    grid = grid_of(part.param, part.optimizer.block_size)
    if not isinstance(lazy.encoding_, LowBit):
        return grid != PLAIN
    boxes = local_boxes(target)
    if grid not in (WHOLE, AROUND):
        return True
    return bool(boxes and code_places(lazy, _one_block(part, name, grid), boxes) is None)


def _one_block(part: OptimizerParam, name: str, grid: str) -> Codes:
    """Return one block of a moment, as the optimizer quantizes it; of blocks around a shard the first one."""
    import torch

    optimizer = part.optimizer
    shared = shared_blocks(part.param, int(optimizer.block_size)) if grid == AROUND else None
    values = torch.zeros(int(optimizer.block_size), device="cpu")
    codes = codes_of(optimizer._subclass_zeros(values, name == "exp_avg", optimizer.block_size))
    assert codes is not None, "a grid of blocks is of an optimizer that quantizes"
    return replace(codes, start=shared.span[0]) if shared else codes
