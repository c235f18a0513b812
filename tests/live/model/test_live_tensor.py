"""The part of a DTensor that a rank holds: our arithmetic against torch's private one."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptmap.live.model.live_tensor import cut
from tests.support.examples import examples


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], list[int], list[Any]]:
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return shape, mesh, [draw(st.sampled_from(choices)) for _ in mesh]


@examples(150)
@given(meshes())
def test_cut_as_torch_does(case: tuple[list[int], list[int], list[Any]]) -> None:
    shape, mesh, placements = case
    for rank in range(math.prod(mesh)):
        coordinate = [int(c) for c in torch.unravel_index(torch.tensor(rank), mesh)]
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, coordinate, placements)
        boxes = cut(shape, mesh, coordinate, placements)
        if math.prod(size) == 0:
            assert boxes == []
        else:
            ((box, place),) = boxes
            assert (box.sizes, box.offsets) == (size, offset)
            assert place.offsets == (0,) * len(shape)


@examples(100)
@given(st.integers(1, 23), st.integers(1, 4), st.integers(1, 4))
def test_cut_strided_shards_as_torch_does(rows: int, parts: int, split: int) -> None:
    whole = torch.arange(rows)
    placement = _StridedShard(0, split_factor=split)
    shards, _ = placement._split_tensor(whole, parts, with_padding=False)
    for rank, shard in enumerate(shards):
        mine = torch.full_like(shard, -1)
        for box, place in cut([rows], [parts], [rank], [placement]):
            start, to, n = box.offsets[0], place.offsets[0], box.sizes[0]
            mine[to : to + n] = whole[start : start + n]
        assert torch.equal(mine, shard)
