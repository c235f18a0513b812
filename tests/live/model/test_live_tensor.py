"""The part of a DTensor that a rank holds: our arithmetic against torch's private one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptmap.live.model.live_tensor import cut, like
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


def test_a_shard_on_the_cpu_stays_there_though_the_mesh_is_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FSDP2's CPUOffloadPolicy keeps them; `DTensor.from_local` moves a shard to the device of its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        mesh = init_device_mesh("cpu", (1,))
        old = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
        shard = torch.randn(4, 6).bfloat16()
        monkeypatch.setattr(mesh, "_device_type", "cuda")
        new = like(old, shard)
        assert new.to_local() is shard or new.to_local().data_ptr() == shard.data_ptr()
        assert (new.device.type, new.dtype, new.placements) == ("cpu", torch.bfloat16, (Shard(0),))
        assert new.device_mesh is mesh and new.detach().shape == old.shape
    finally:
        dist.destroy_process_group()
