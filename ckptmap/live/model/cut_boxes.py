"""Which boxes of a tensor a rank of a mesh holds: torch.chunk of each dim that is cut, in integers alone.

[8, 4] cut by dim 0 over 2 ranks, rank 1  ->  box (4, 0) + (4, 4) of the tensor, all of the local one
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from ckptmap.tensors import Box


@lru_cache(maxsize=4096)
def boxes_of_cuts(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: tuple[tuple[int | None, int], ...],
) -> tuple[tuple[Box, Box], ...]:
    """Return (box, box in the local tensor) for what the rank at `coordinate` of a mesh holds. Many tensors of
    a model have one shape, and every save cuts them alike.

    cuts  the dim that each placement cuts (None: it does not), and into how many pieces before"""
    runs = [[range(n)] for n in shape]
    for size, rank, (dim, split) in zip(mesh_shape, coordinate, cuts, strict=True):
        if dim is not None:
            runs[dim] = _chunk(runs[dim], size, rank, split)
    return tuple(_boxes(runs))


def _chunk(runs: list[range], parts: int, index: int, split: int) -> list[range]:
    """Return chunk `index` of `parts` of the indices in `runs`, as torch.chunk cuts them; a strided
    shard cuts them into `split` pieces first, and takes its chunk of each."""
    total = sum(map(len, runs))
    taken: list[range] = []
    for piece in range(split):
        start, stop = chunk_bounds(total, split, piece)
        low, high = chunk_bounds(stop - start, parts, index)
        taken += _take(runs, start + low, start + high)
    return taken


def chunk_bounds(n: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and stop of chunk `index`, where torch.chunk cuts `n` elements into `parts`."""
    step = -(-n // parts)
    start = min(index * step, n)
    return start, min(start + step, n)


def _take(runs: list[range], start: int, stop: int) -> Iterator[range]:
    """Yield elements start..stop of the runs, concatenated."""
    for run in runs:
        part = run[max(start, 0) : max(stop, 0)]
        if part:
            yield part
        start, stop = start - len(run), stop - len(run)


def _boxes(runs: list[list[range]]) -> Iterator[tuple[Box, Box]]:
    """Yield a box, and the same box in the local tensor, for every combination of runs of the dims."""
    per_dim = []
    for dim in runs:
        starts = itertools.accumulate(map(len, dim), initial=0)
        per_dim.append([(r.start, at, len(r)) for r, at in zip(dim, starts, strict=False)])
    for combination in itertools.product(*per_dim):
        sizes = tuple(n for _, _, n in combination)
        if all(sizes):
            yield (
                Box(tuple(start for start, _, _ in combination), sizes),
                Box(tuple(at for _, at, _ in combination), sizes),
            )
