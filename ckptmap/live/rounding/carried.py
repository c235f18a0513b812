"""Are the moments of a checkpoint those that a run on any number of ranks would have?"""

from __future__ import annotations

from dataclasses import replace

from ckptmap.live.model.live_tensor import LiveTensor, local_boxes
from ckptmap.live.optimizer.code_blocks import takes_codes
from ckptmap.live.optimizer.family import Codes, OptimizerParam, codes_of
from ckptmap.live.rounding.cut_params import cut_blocks
from ckptmap.live.rounding.moments import AROUND, CUT, PLAIN, SHARD, grid_of
from ckptmap.live.rounding.record import record_of
from ckptmap.live.rounding.shared_blocks import shared_blocks
from ckptmap.optim.lowbit import LowBit
from ckptmap.storage.lazy_tensor import LazyTensor

OTHER_BLOCKS = "in blocks of each rank's shard when it was saved, now in those of the whole tensor"


def has_other_blocks(part: OptimizerParam, target: LiveTensor, name: str, lazy: LazyTensor) -> bool:
    """Return whether a saved moment is not in the blocks of the whole tensor, or this rank cannot take its
    shard of them as they are. Without rounding by position: no."""
    if record_of(part.optimizer) is None or lazy.shape != tuple(target.tensor.shape):
        return False
    grid = grid_of(part.param, part.optimizer.block_size)
    if not isinstance(lazy.encoding_, LowBit):
        return grid != PLAIN
    boxes = local_boxes(target)
    if grid in (PLAIN, SHARD):
        return True
    return bool(boxes) and not takes_codes(lazy, _one_block(part, name, grid), boxes)


def is_cut_anew(part: OptimizerParam) -> bool:
    """Return whether the live moments of a parameter are in blocks that shards cut, so that they cannot take those of
    each rank's own blocks, on the same ranks neither."""
    if record_of(part.optimizer) is None:
        return False
    return grid_of(part.param, part.optimizer.block_size) == CUT


def _one_block(part: OptimizerParam, name: str, grid: str) -> Codes:
    """Return one block of a moment, as the optimizer quantizes it, where this rank's shard begins."""
    import torch

    optimizer, block = part.optimizer, int(part.optimizer.block_size)
    shared = shared_blocks(part.param, block) if grid == AROUND else None
    cut = cut_blocks(part.param, block) if grid == CUT else None
    values = torch.zeros(block, device="cpu")
    codes = codes_of(optimizer._subclass_zeros(values, name == "exp_avg", block))
    assert codes is not None, "a grid of blocks is of an optimizer that quantizes"
    return replace(
        codes, start=shared.span[0] if shared else None, segments=cut.segments if cut else None
    )
