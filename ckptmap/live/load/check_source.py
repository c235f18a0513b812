"""Compare the checksums that a checkpoint states with the bytes that the ranks of a model have read.

Each rank compares the records that it reads whole while it reads them. Of a record that several
ranks read a part of each, one rank puts the checksums of the parts together.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.storage.file_records import DamagedRecord
from ckptmap.storage.source_sums import Begun, SourceCheck


def finish(checkpoint: Checkpoint, peers: Sequence[RankGroup], verify: str) -> SourceCheck:
    """Return what was compared by all ranks, on the first of them; nothing on the others.

    Every rank of `peers` calls it. Raise DamagedRecord (CKM105) on the first rank.
    """
    sums = checkpoint.files.sums
    if not sums.is_on:
        return SourceCheck()
    checked, rank = 0, 0
    reports: dict[int, tuple[int, Begun]] = {}
    if peers:
        rank, reports = _exchanged(sums.checked_nbytes, sums.begun(), peers)
        if rank != min(reports):
            return SourceCheck()
    try:
        for other, (nbytes, begun) in reports.items():
            if other != rank:
                checked += nbytes
                sums.absorb(begun)
        check = checkpoint.files.settle_sums(whole=verify == "full")
    except DamagedRecord as error:
        tensors = ((fqn, stored) for fqn in checkpoint for stored in checkpoint[fqn].beneath)
        raise error.naming(tensors) from error
    return check + SourceCheck(checked)


def _exchanged(
    nbytes: int, begun: Begun, peers: Sequence[RankGroup]
) -> tuple[int, dict[int, tuple[int, Begun]]]:
    """Return this rank, and for every rank of the groups what it has compared and begun."""
    import torch

    rank = torch.distributed.get_rank()
    reports = {rank: (nbytes, begun)}
    for group in peers:  # what one group told is passed on to the next
        answers = group.all(reports)
        reports = {other: report for answer in answers for other, report in answer.items()}
    return rank, reports
