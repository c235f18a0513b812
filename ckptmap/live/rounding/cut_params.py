"""Which ranks share the quantized blocks of a parameter that is cut by columns, or by several dims of a mesh.

[4, 640] in blocks of 256, columns over 2 ranks  ->  block 1 is columns 256..512 of row 0, of both ranks

Most blocks are shared, so that a rank has the codes of its own elements alone, and the scales of all blocks that it may
touch; ranks agree on the scales in each step (see `shared_scales`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptmap.live.model.cut_boxes import boxes_of_cuts
from ckptmap.live.model.live_tensor import is_dtensor
from ckptmap.live.rounding.positions import boxes_of
from ckptmap.live.rounding.shared_blocks import reaches
from ckptmap.optim.block_segments import BlockSegments, block_range, segments_on

if TYPE_CHECKING:
    import torch

Place = tuple[int, ...]
"""Coordinates in a mesh."""
Cuts = tuple[tuple[int | None, int], ...]
"""How each dim of a mesh cuts a tensor: the tensor's dim (None: it replicates), and a strided shard's factor."""


@dataclass(frozen=True, eq=False)
class CutBlocks:
    """How one rank's shard lies in blocks that other ranks share.

    groups    the groups of ranks that agree on scales, one after the other
    first     number of the first block of all that these ranks hold
    count     blocks from that one to the last
    segments  the shard in its blocks, on its device; None: this rank holds nothing
    ranks     how many agree
    shards    how many there are: each is about this part of the tensor
    """

    groups: tuple[Any, ...]
    first: int
    count: int
    segments: BlockSegments | None
    ranks: int
    shards: int

    @property
    def mine(self) -> slice:
        """The blocks of this rank, of all `count`."""
        assert self.segments is not None
        low = self.segments.first - self.first
        return slice(low, low + self.segments.count)


def cut_blocks(param: torch.Tensor, block: int) -> CutBlocks | None:
    """Return how ranks share the blocks of a parameter; None: a rank holds several boxes of it, it is a partial sum,
    or ranks have no way to exchange what is on its device."""
    if not is_dtensor(param) or (place := param.device_mesh.get_coordinate()) is None:
        return None
    if any(one.is_partial() for one in param.placements):
        return None
    mesh, shape = param.device_mesh, tuple(param.shape)
    cuts = tuple((getattr(p, "dim", None), getattr(p, "split_factor", 1)) for p in param.placements)
    found = _shared(shape, tuple(mesh.shape), cuts, block)
    if found is None:
        return None
    groups = tuple(mesh.get_group(dim) for dim in found.dims)
    if not all(reaches(group, param) for group in groups):
        return None
    first, last = found.ranges.get(_without(place, found.dims, cuts), (0, 0))
    boxes = boxes_of(param)
    mine = segments_on(shape, boxes[0][0], block, param.device) if boxes else None
    ranks = math.prod(mesh.size(dim) for dim in found.dims)
    shards = math.prod(mesh.size(at) for at, (dim, _) in enumerate(cuts) if dim is not None)
    return CutBlocks(groups, first, last - first, mine, ranks, shards)


@dataclass(frozen=True, eq=False)
class _Shared:
    """The dims of a mesh over which ranks share blocks; and, by their place in the other dims, the first block of
    those that hold some, and the one after the last."""

    dims: Place
    ranges: Mapping[Place, tuple[int, int]]


@lru_cache(maxsize=1024)
def _shared(shape: Place, sizes: Place, cuts: Cuts, block: int) -> _Shared | None:
    """Return the dims that cut columns, where these are enough, else all that cut; None: a rank holds several
    boxes. Looked up where another parameter is cut alike."""
    ranges = {}
    counts = [range(1 if dim is None else size) for size, (dim, _) in zip(sizes, cuts, strict=True)]
    for place in itertools.product(*counts):
        boxes = boxes_of_cuts(shape, sizes, place, cuts)
        if len(boxes) > 1:
            return None
        if boxes:
            ranges[place] = block_range(shape, boxes[0][0], block)
    columns = tuple(at for at, (dim, _) in enumerate(cuts) if dim)
    every = tuple(at for at, (dim, _) in enumerate(cuts) if dim is not None)
    for dims in filter(None, (columns, every)):
        joined: dict[Place, tuple[int, int]] = {}
        for place, (first, last) in ranges.items():
            key = _without(place, dims, cuts)
            low, high = joined.get(key, (first, last))
            joined[key] = (min(low, first), max(high, last))
        inorder = sorted(joined.values())
        if all(one[1] <= two[0] for one, two in itertools.pairwise(inorder)):
            return _Shared(dims, joined)
    return None


def _without(place: Sequence[int], dims: Place, cuts: Cuts) -> Place:
    """Return a place with 0 in some dims, and in those that replicate."""
    return tuple(
        0 if at in dims or cuts[at][0] is None else number for at, number in enumerate(place)
    )
