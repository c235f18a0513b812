"""Which rank holds what of the quantized blocks of a parameter that is cut by rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptmap.core.strided_dims import flat_span
from ckptmap.live.model.live_tensor import cut, is_dtensor

if TYPE_CHECKING:
    import torch

Span = tuple[int, int]
"""Flat positions in the whole tensor: of the first element, and of the one after the last."""


def covering(shard: Span, block: int) -> Span:
    """Return the span of all blocks that a shard touches."""
    start, stop = shard
    return (start // block * block, -(-stop // block) * block) if stop > start else (start, start)


@dataclass(frozen=True, eq=False)
class SharedBlocks:
    """How the blocks of a parameter lie over the ranks of one group; by number in the group.

    group   the ranks that cut it
    shards  what each holds
    number  of this rank
    block   elements of a block
    """

    group: Any
    shards: Sequence[Span]
    number: int
    block: int

    @property
    def mine(self) -> Span:
        return self.shards[self.number]

    @property
    def span(self) -> Span:
        return covering(self.mine, self.block)

    @property
    def lead(self) -> int:
        """Elements of the first block before this rank's shard."""
        return self.mine[0] - self.span[0]

    def sent(self, other: int) -> Span:
        """Return what this rank sends to another: its elements of the other's blocks."""
        if other == self.number:
            return (0, 0)
        return _common(self.mine, covering(self.shards[other], self.block))

    def received(self, other: int) -> Span:
        if other == self.number:
            return (0, 0)
        return _common(self.shards[other], self.span)


def _common(one: Span, two: Span) -> Span:
    start, stop = max(one[0], two[0]), min(one[1], two[1])
    return (start, max(start, stop))


def shared_blocks(param: torch.Tensor, block: int) -> SharedBlocks | None:
    """Return how ranks share the blocks of a parameter that is cut by rows, over one dim of its mesh; None:
    it is cut otherwise, or its ranks have no way to exchange what is on its device."""
    import torch.distributed as dist

    if not is_dtensor(param) or (here := param.device_mesh.get_coordinate()) is None:
        return None
    dims = [at for at, one in enumerate(param.placements) if not one.is_replicate()]
    if len(dims) != 1 or type(param.placements[dims[0]]).__name__ != "Shard":
        return None
    (dim,) = dims
    mesh = param.device_mesh
    group = mesh.get_group(dim)
    shards: list[Span] = [(0, 0)] * mesh.size(dim)
    for at in range(mesh.size(dim)):
        place = [*here[:dim], at, *here[dim + 1 :]]
        boxes = cut(tuple(param.shape), mesh.shape, place, param.placements)
        if len(boxes) > 1:
            return None
        if boxes:
            start, stop = flat_span(tuple(param.shape), boxes[0][0])
            if stop - start != boxes[0][0].numel:
                return None
            rank = int(mesh.mesh[tuple(place)])
            shards[dist.get_group_rank(group, rank)] = (start, stop)
    return (
        SharedBlocks(group, shards, dist.get_rank(group), block) if reaches(group, param) else None
    )


def reaches(group: Any, param: torch.Tensor) -> bool:
    """Return whether the group has a backend for the device on which the parameter's shard is."""
    try:
        return group._get_backend(param.device) is not None
    except RuntimeError:
        return False
