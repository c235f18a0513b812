"""Compare the checksums that the source states with the bytes that a run has read.

Each rank compares the records that it reads whole while it reads them. Here the ranks put together
what each has read of the others, and rank 0 reads once more what nobody could compare on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import human
from ckptmap.core.json_text import parse_json
from ckptmap.execution.copy import key_of
from ckptmap.execution.ranks import Ranks
from ckptmap.planning.file_plan import Encode, FilePlan
from ckptmap.storage.file_records import DamagedRecord
from ckptmap.storage.files import Files
from ckptmap.storage.source_sums import SourceCheck
from ckptmap.tensors import StoredTensor


def settle(
    files: Files, ranks: Ranks, *, resumed: Iterable[tuple[str, StoredTensor]], whole: bool
) -> SourceCheck:
    """Return, on rank 0, what was compared by all ranks. Waits for every rank.

    resumed  the tensors of a run that was continued: what the earlier run read was perhaps not
             compared to the end, so that their records are read again
    whole    also read the rest of records of which a part was read

    Raise DamagedRecord (CKM105), and as `Files.read_into` does.
    """
    sums = files.sums
    if not sums.is_on:
        return SourceCheck()
    checked = 0
    if ranks.world_size > 1:
        mine = json.dumps([sums.checked_nbytes, sums.begun()]).encode()
        for rank, report in enumerate(ranks.gather(mine)):
            if ranks.rank == 0 and rank:
                nbytes, begun = parse_json(report)
                checked += nbytes
                sums.absorb(begun)
        if ranks.rank:
            return SourceCheck()
    for _, stored in resumed:
        for _, region, _ in stored.chunks:
            sums.read_again(region.file, region.offset, region.span_nbytes)
    return files.settle_sums(whole) + SourceCheck(checked)


def begin(ckpt: Checkpoint, check: str) -> None:
    """Compare what is read of a checkpoint from now on, unless `check` is "none".

    Where ckptmap wrote the checkpoint, the digests in its manifest count as stated, too.
    Raise SourceError CKM403 where the manifest is damaged.
    """
    sums = ckpt.files.sums
    sums.begin()
    sums.is_on = check != "none"
    if sums.is_on:
        sums.take_manifests()


@contextmanager
def compared(ckpt: Checkpoint, check: str) -> Iterator[None]:
    """Compare what is read in the block, as `begin` does; afterwards every read compares again."""
    begin(ckpt, check)
    try:
        yield
    finally:
        ckpt.files.sums.is_on = True


def source_notes(check: SourceCheck) -> list[str]:
    """Return what a user should know of bytes that no checksum has proven."""
    notes = []
    if check.unchecked:
        notes.append(
            f"{human(check.unchecked)} were read from parts of records and not compared with their"
            " checksums; --check-source full reads the rest of these records"
        )
    if check.unstated:
        notes.append(
            f"the source states no checksum for {human(check.unstated)} (saved with"
            " torch.serialization.set_crc32_options(False)): nothing tells whether they are damaged"
        )
    return notes


def named(
    error: DamagedRecord, plan: Sequence[FilePlan], encodes: Sequence[Encode]
) -> DamagedRecord:
    """Return the error with the names of the tensors that lie in the damaged record."""
    return error.naming(tensors_read(plan, encodes))


def tensors_read(
    plan: Sequence[FilePlan], encodes: Sequence[Encode]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield every stored tensor that is read, with its name."""
    for item in plan:
        for slot, source in zip(item.out.slots, item.sources, strict=True):
            if source is not None:
                yield key_of(slot), source
    for step in encodes:
        yield from ((step.tensor.fqn, stored) for stored in step.tensor.beneath)
