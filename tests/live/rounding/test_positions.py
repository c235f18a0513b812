"""Elements know their position in the whole tensor, however it is cut."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptmap.live.model.live_tensor import cut
from ckptmap.live.rounding.position_bits import key_of, round_at, words_at
from ckptmap.live.rounding.positions import on_grid, positions, runs
from ckptmap.tensors import Box

CPU = torch.device("cpu")
WORLDS = (1, 2, 3, 4, 7, 8)


def chunks(whole: torch.Tensor, dim: int, world: int) -> list[torch.Tensor]:
    """As torch cuts: the last ranks may have less, or nothing."""
    made = list(whole.chunk(world, dim))
    return made + [whole.narrow(dim, 0, 0)] * (world - len(made))


def found(shape: Any, boxes: Any, local: Any) -> torch.Tensor:
    rows, width = runs(shape, boxes, local)
    return (rows.unsqueeze(1) + torch.arange(width)).reshape(local)


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """A shape, and (dim, ranks) of one or two cuts."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    one = st.tuples(st.integers(0, len(shape) - 1), st.sampled_from(WORLDS))
    return shape, draw(st.lists(one, min_size=1, max_size=2))


@settings(deadline=None, max_examples=150)
@given(cuts())
def test_any_cut_gives_the_positions_of_the_whole(
    case: tuple[tuple[int, ...], list[tuple[int, int]]],
) -> None:
    shape, dims = case
    whole = torch.arange(math.prod(shape)).view(shape)
    sizes = [world for _, world in dims]
    placements = [Shard(dim) for dim, _ in dims]
    values = torch.randn(shape)
    key = key_of(1, 1, "a").tensors()
    want = round_at(values, torch.zeros(1, dtype=torch.int32), values.numel(), key)
    for place in itertools.product(*map(range, sizes)):
        held, floats, bits = whole, values, want
        for (dim, world), at in zip(dims, place, strict=True):
            held, floats, bits = (chunks(t, dim, world)[at] for t in (held, floats, bits))
        boxes = cut(shape, sizes, place, placements)
        if not held.numel():
            assert not boxes
            continue
        assert torch.equal(found(shape, boxes, tuple(held.shape)), held)
        at = positions(shape, boxes, tuple(held.shape), CPU)
        assert torch.equal(round_at(floats.contiguous(), at.rows, at.width, key), bits)


@pytest.mark.parametrize("shape", [(16, 6), (24, 4, 2), (19, 3)])
def test_rows_that_fully_shard_cuts_after_tensor_parallelism(shape: tuple[int, ...]) -> None:
    """FSDP2 over TP of one dim: a rank's rows lie in several places."""
    whole = torch.arange(math.prod(shape)).view(shape)
    sizes = (2, 2)
    for place in itertools.product(range(2), range(2)):
        inner = chunks(whole, 0, 2)[place[1]]
        want = chunks(inner, 0, 2)[place[0]]
        boxes = cut(shape, sizes, place, [_StridedShard(0, split_factor=2), Shard(0)])
        assert sum(box.numel for box, _ in boxes) == want.numel()
        assert torch.equal(found(shape, boxes, tuple(want.shape)), want)


def test_few_runs_are_made() -> None:
    """What lies in one piece is one run, so that nothing as large as the weight is kept for it."""
    whole = (64, 4, 3, 3)
    for dim, placement, count in ((0, Shard(0), 1), (1, Shard(1), 64), (0, Replicate(), 1)):
        boxes = cut(whole, (2,), (1,), [placement])
        local = boxes[0][0].sizes
        rows, width = runs(whole, boxes, local)
        assert len(rows) == count and count * width == math.prod(local), dim


def test_positions_beyond_32_bits() -> None:
    """Three rows around element 2^32 of [70000, 70000], by their offset alone; in int32 up to there."""
    shape, row = (70000, 70000), 2**32 // 70000
    box = Box((row - 1, 5), (3, 4))
    at = positions(shape, [(box, Box((0, 0), (3, 4)))], (3, 4), CPU)
    numbers = [(row - 1 + line) * 70000 + 5 for line in range(3)]
    assert at.rows.tolist() == numbers and at.rows.dtype == torch.int64 and at.width == 4
    key = key_of(0, 1, "a").tensors()
    alone = [words_at(torch.tensor([number]), 4, key)[0] for number in numbers]
    assert torch.equal(words_at(at.rows, 4, key), torch.stack(alone))
    assert len({int(word) for line in alone for word in line}) == 12
    below = positions(
        (1 << 16, 1 << 16), [(Box((65535, 0), (1, 9)), Box((0, 0), (1, 9)))], (1, 9), CPU
    )
    assert below.rows.tolist() == [-65536] and below.rows.dtype == torch.int32


GRIDS = [
    ((64, 128), 4, Shard(0), 256, True),
    ((50, 128), 4, Shard(0), 256, False),  # 13 rows are six and a half blocks
    ((50, 128), 4, Shard(0), 128, True),
    ((64, 512), 2, Shard(1), 256, True),
    ((64, 512), 4, Shard(1), 256, False),  # 128 columns are half a block of each row
    ((64, 384), 3, Shard(1), 128, True),
    ((6400,), 5, Shard(0), 256, True),
    ((6400,), 4, Shard(0), 256, False),
]


@pytest.mark.parametrize(("shape", "world", "placement", "block", "fits"), GRIDS)
def test_blocks_of_shards_that_are_blocks_of_the_whole(
    shape: tuple[int, ...], world: int, placement: Any, block: int, fits: bool
) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape) // block
    locals_ = chunks(numbers, placement.dim, world)
    each = [part.reshape(-1, block) if part.numel() % block == 0 else None for part in locals_]
    same = all(part is not None and bool((part == part[:, :1]).all()) for part in each)
    whole = same and all(
        bool((torch.bincount(part.reshape(-1)).unique() <= block).all())
        for part in each
        if part is not None
    )
    boxes = [cut(shape, (world,), (rank,), [placement]) for rank in range(world)]
    assert all(on_grid(shape, some, block) for some in boxes) == whole == fits
