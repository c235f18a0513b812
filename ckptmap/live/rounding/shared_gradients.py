"""The gradients of blocks that ranks share: each gets, once a step, what its blocks lack.

    rank 0 holds 0..300, rank 1 300..600, blocks of 256  ->  rank 0 sends 256..300 to rank 1, which sends
    300..512 to rank 0

One `all_to_all` a step and group, for all parameters: fewer than two blocks for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.live.optimizer.family import local_of
from ckptmap.live.rounding.shared_blocks import Span

if TYPE_CHECKING:
    import torch

    from ckptmap.live.rounding.record import ParamPlace


@dataclass(frozen=True, eq=False)
class Edges:
    """What other ranks hold of the blocks of one parameter: (position in the span, values) each, float32.

    No weights where the optimizer needs none."""

    grads: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    weights: list[tuple[int, torch.Tensor]] = field(default_factory=list)


def exchange(
    places: Iterable[ParamPlace], grads: Mapping[int, torch.Tensor], with_weights: bool
) -> dict[int, Edges]:
    """Return the edges of every parameter whose blocks ranks share, by its id.

    grads         the shards of gradients, by the id of their parameters
    with_weights  do moments depend on the weights, too?

    Every rank of a group calls it with the same parameters, in one order, those without a gradient
    too. Raises LoadError CKM520 where a parameter has a gradient on some ranks only.
    """
    by_group: dict[Any, list[ParamPlace]] = {}
    for place in places:
        if place.shared is not None:
            by_group.setdefault(place.shared.group, []).append(place)
    found: dict[int, Edges] = {}
    for group, some in by_group.items():
        found |= _exchange(group, some, grads, with_weights)
    return found


def _exchange(
    group: Any, places: Sequence[ParamPlace], grads: Mapping[int, torch.Tensor], with_weights: bool
) -> dict[int, Edges]:
    """To each rank goes a flag for each parameter, whether it has a gradient, then the values that it lacks."""
    import torch
    import torch.distributed as dist

    ranks = range(dist.get_world_size(group))
    device = local_of(places[0].param.detach()).device
    flags = torch.tensor([float(id(place.param) in grads) for place in places], device=device)
    pieces: list[torch.Tensor] = []
    sizes, expected = [], []
    for rank in ranks:
        mine = [one for place in places for one in _sent(place, rank, grads, with_weights)]
        pieces += [flags, *mine]
        sizes.append(len(places) + sum(one.numel() for one in mine))
        counts = (_count(place.shared.received(rank)) for place in places if place.shared)
        expected.append(len(places) + sum(counts) * (1 + with_weights))
    taken = torch.empty(sum(expected), dtype=torch.float32, device=device)
    dist.all_to_all_single(taken, torch.cat(pieces), expected, sizes, group=group)
    by_rank = torch.split(taken, expected)
    with_gradient = torch.stack([one[: len(places)] for one in by_rank]).sum(0)
    require_alike(places, with_gradient.tolist(), [len(ranks)] * len(places))
    edges = {id(place.param): Edges() for place in places}
    for rank, values in zip(ranks, by_rank, strict=True):
        _take(places, edges, rank, values[len(places) :], with_weights)
    return edges


def _count(span: Span) -> int:
    return span[1] - span[0]


def _sent(
    place: ParamPlace, rank: int, grads: Mapping[int, torch.Tensor], with_weights: bool
) -> list[torch.Tensor]:
    """Return what a rank gets of one parameter, in float32."""
    assert place.shared is not None
    start, stop = place.shared.sent(rank)
    at, count = start - place.shared.mine[0], stop - start
    if not count:
        return []
    local = local_of(place.param.detach()).reshape(-1).narrow(0, at, count)
    grad = grads.get(id(place.param))
    values = [local.new_zeros(count) if grad is None else grad.reshape(-1).narrow(0, at, count)]
    return [one.float() for one in ([*values, local] if with_weights else values)]


def _take(
    places: Sequence[ParamPlace], edges: Mapping[int, Edges],
    rank: int, values: torch.Tensor, with_weights: bool,
) -> None:  # fmt: skip
    """Add what a rank has sent to the edges."""
    at = 0
    for place in places:
        assert place.shared is not None
        start, stop = place.shared.received(rank)
        mine = edges[id(place.param)]
        for into in (mine.grads, mine.weights)[: 1 + with_weights] if stop > start else ():
            into.append((start - place.shared.span[0], values.narrow(0, at, stop - start)))
            at += stop - start


def require_alike(
    places: Sequence[ParamPlace], counts: Sequence[float], ranks: Sequence[int]
) -> None:
    """Raise LoadError CKM520 where a parameter has a gradient on some of the ranks only: on `counts` of `ranks`."""
    for place, found, every in zip(places, counts, ranks, strict=True):
        if found not in (0, every):
            raise LoadError(
                "CKM520",
                f"optimizer: {place.fqn} has a gradient on {int(found)} of {every} ranks, which"
                " share blocks of its moments: expected one on all of them or on none",
                "give it a gradient on all ranks, of zeros where the loss does not depend on it",
            )


def around(
    shard: torch.Tensor, lead: int, span: Span, edges: Sequence[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """Return the values of all blocks, flat in float32: the shard's and those of other ranks."""
    import torch

    values = torch.zeros(span[1] - span[0], dtype=torch.float32, device=shard.device)
    values.narrow(0, lead, shard.numel()).copy_(shard.reshape(-1))
    for at, some in edges:
        values.narrow(0, at, some.numel()).copy_(some)
    return values
