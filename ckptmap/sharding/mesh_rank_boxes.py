"""The box of a tensor that each rank of a device mesh holds, as torch's `fully_shard` and
`parallelize_module` cut it."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.errors import PlanError
from ckptmap.protocols import Placement
from ckptmap.sharding.dtensor_spec import chunk_of, cut_runs
from ckptmap.tensors import Box, TensorInfo


def boxes_by_rank(placement: Placement, info: TensorInfo) -> list[Box]:
    """Return the box of each rank, in rank order; replicas have equal boxes, a rank that holds
    nothing an empty one.

    Raises PlanError CKM504 where two mesh dims cut one tensor dim so unevenly that torch's
    placements do not say which rows fully_shard holds (pytorch#161368)."""
    if placement.shards is None:
        return [Box.whole(info.shape)] * placement.world_size
    sizes = [size for _, size in placement.mesh]
    boxes = []
    for rank in range(placement.world_size):
        at = coordinate(rank, sizes)
        runs = [_run(placement.shards, dim, n, sizes, at) for dim, n in enumerate(info.shape)]
        boxes.append(Box(tuple(start for start, _ in runs), tuple(n for _, n in runs)))
    return boxes


def coordinate(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinate of a rank in a row-major mesh of these sizes."""
    at = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        at.append(place)
    return tuple(reversed(at))


def _run(
    shards: Sequence[int | None],
    dim: int,
    length: int,
    sizes: Sequence[int],
    at: Sequence[int],
) -> tuple[int, int]:
    """Return (start, length) along a tensor dim, cut by TP first and then by FSDP, as fully_shard does."""
    axes = [axis for axis, cut in enumerate(shards) if cut == dim]
    start, numel = 0, length
    for axis in reversed(axes):
        offset, numel = chunk_of(numel, sizes[axis], at[axis])
        start += offset
    if len(axes) == 2:
        outer, inner = axes
        described = cut_runs(((0, length),), sizes[outer], at[outer], sizes[inner])
        described = cut_runs(described, sizes[inner], at[inner])
        filled = [run for run in described if run[1]]
        expected = [(start, numel)] if numel else []
        if filled != expected:
            raise PlanError(
                "CKM504",
                f"{length} rows over dp {sizes[outer]} x tp {sizes[inner]}: torch's placements"
                " describe other rows than fully_shard holds",
                "choose sizes that divide the rows, or replicate it over tp in the plan",
            )
    return start, numel
