"""The scales of blocks of which each rank holds a small part: ranks agree on them once a step.

    rank 0  largest |m| of its elements of blocks 0, 1, 2  ->  9, 4, 0
    rank 1                                                 ->  0, 7, 5      all_reduce(MAX)  ->  9, 7, 5

The new moments are in float32 until then: as many parameters at once as fit into some memory, which a step of most
models does. Each rank encodes its own elements, with the same arithmetic as torchao encodes a whole block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptmap.live.optimizer import whole_blocks
from ckptmap.live.optimizer.family import Codes, local_of
from ckptmap.live.rounding.shared_gradients import require_alike

if TYPE_CHECKING:
    import torch

    from ckptmap.live.rounding.cut_params import CutBlocks
    from ckptmap.live.rounding.record import ParamPlace

LIMIT = 256 << 20
"""Bytes of moments in float32 that a rank keeps until the ranks have agreed."""

Groups = tuple[Any, ...]
"""Groups of ranks that agree, one after the other."""
Values = Sequence[tuple[Codes, "torch.Tensor"]]
"""(the codes of a moment, its new values in float32) each."""


@dataclass(frozen=True, eq=False)
class _Moments:
    """New moments of one parameter: `count` by number; no values where they are not quantized, or are empty."""

    place: ParamPlace
    cut: CutBlocks
    count: int
    values: Values


class SharedScales:
    """Collects new moments of a step, and encodes them once their scales are agreed on.

    Every rank of a group adds the same parameters in one order, those of which it holds nothing too.
    """

    def __init__(self) -> None:
        self._nbytes = 0.0
        self._waiting: dict[Groups, list[_Moments]] = {}

    def add(self, place: ParamPlace, count: int, values: Values) -> None:
        """Add the `count` moments of a parameter."""
        cut = place.cut
        assert cut is not None
        nbytes = 4.0 * count * math.prod(place.param.shape) / cut.shards  # the same on all ranks
        if self._nbytes + nbytes > LIMIT:
            self.agree()
        self._waiting.setdefault(cut.groups, []).append(_Moments(place, cut, count, values))
        self._nbytes += nbytes

    def agree(self) -> None:
        """Agree on the scales of all that waits, and encode it."""
        waiting, self._waiting, self._nbytes = self._waiting, {}, 0.0
        for groups, some in waiting.items():
            peaks = iter(_agreed(groups, some))
            for one in some:
                for (codes, new), of_all in zip(one.values, islice(peaks, one.count), strict=False):
                    whole_blocks.encode(codes, new, of_all[one.cut.mine])


def _agreed(groups: Groups, moments: Sequence[_Moments]) -> tuple[torch.Tensor, ...]:
    """Return the largest magnitude over all ranks of each block of each moment. Floats that are not negative are
    ordered as their bits are, which puts NaN above all numbers: as integers, every backend keeps it."""
    import torch
    import torch.distributed as dist

    counts = [one.cut.count for one in moments for _ in range(one.count)]
    device = local_of(moments[0].place.param.detach()).device
    peaks = torch.zeros(sum(counts), dtype=torch.float32, device=device)
    each = torch.split(peaks, counts)
    rest = iter(each)
    for one in moments:
        for (codes, new), of_all in zip(one.values, islice(rest, one.count), strict=False):
            assert codes.segments is not None
            of_all[one.cut.mine] = codes.segments.peaks(new)
    for group in groups:
        dist.all_reduce(peaks.view(torch.int32), dist.ReduceOp.MAX, group=group)
    peaks.masked_fill_(peaks.isnan(), math.nan)  # of one kind, as amax makes it
    return each


def require_gradients(places: Iterable[ParamPlace], grads: Mapping[int, torch.Tensor]) -> None:
    """Raise LoadError CKM520 where a parameter of which ranks agree on scales has a gradient on some ranks only.
    Every rank of a group calls it with the same parameters, in one order."""
    import torch
    import torch.distributed as dist

    by_groups: dict[Groups, list[ParamPlace]] = {}
    for place in places:
        if place.cut is not None:
            by_groups.setdefault(place.cut.groups, []).append(place)
    for groups, some in by_groups.items():
        device = local_of(some[0].param.detach()).device
        counts = torch.tensor([int(id(place.param) in grads) for place in some], device=device)
        for group in groups:
            dist.all_reduce(counts, group=group)
        require_alike(some, counts.tolist(), [place.cut.ranks for place in some if place.cut])
