"""Boxes of one tensor that ranks of different meshes hold: no mesh says that their values are equal.

    mesh ("tp", "dp"), a norm sharded over "dp" alone   -> each tp rank has computed the same
    mesh ("ep", "dp"), experts sharded over "dp" alone  -> other weights under one name: refused

One mesh names one rank for each box, so that two ranks that would save the same box are of different
meshes. Only then are digests computed and exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.errors import RunError
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.optimizer.local_state import LocalState
from ckptmap.live.save.assign_writers import Offer
from ckptmap.live.save.replica_digests import Digest, differ, digests_of
from ckptmap.tensors import Box, Path

Claim = tuple[Path, Box]


def require_alike(held: LocalState, offers: Sequence[Sequence[Offer]], peers: RankGroup) -> bool:
    """Return whether ranks of different meshes hold one box. Every rank calls it with the offers of all.

    Raises RunError CKM509, on all ranks, where they hold different values of it."""
    claims = _claimed(offers)
    if not claims:
        return False
    mine: dict[Claim, Digest] = {}
    with peers.together():
        held_here = {
            (holding.path, piece.box): [piece]
            for holding in held.holdings
            for piece in holding.pieces
            if peers.rank in claims.get((holding.path, piece.box), ())
        }
        mine = dict(zip(held_here, digests_of(list(held_here.values())), strict=True))
    told = peers.all(mine)
    for claim, ranks in claims.items():
        for other in ranks[1:]:
            if differ(told[other][claim], told[ranks[0]][claim]):
                raise _different(claim, ranks[0], other)
    return True


def _claimed(offers: Sequence[Sequence[Offer]]) -> dict[Claim, list[int]]:
    """Return the boxes that several ranks would save, with these ranks."""
    found: dict[Claim, list[int]] = {}
    for rank, some in enumerate(offers):
        for one in some:
            if one.primary and one.checked:
                for box in one.boxes:
                    found.setdefault((one.path, box), []).append(rank)
    return {claim: ranks for claim, ranks in found.items() if len(ranks) > 1}


def _different(claim: Claim, first: int, other: int) -> RunError:
    path, box = claim
    return RunError(
        "CKM509",
        f"{'.'.join(map(str, path))}: ranks {first} and {other}, of different meshes, hold other"
        f" values of the part at {list(box.offsets)}, sizes {list(box.sizes)}",
        "give weights that each group of ranks has for itself (experts, stages) names of their own,"
        " or shard them over a mesh of all these ranks; replicas='first' saves the lowest rank's",
    )
