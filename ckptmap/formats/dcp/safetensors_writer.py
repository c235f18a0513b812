"""Write one safetensors file per rank, as torch's DCP does with
`HuggingFaceStorageWriter(save_distributed=True)`.

    chunks of rank R -> shard-(R+1)-model-00001-of-00001.safetensors
    `__metadata__`: {"DCP_SHARDING_INFO": json {fqn: {"saved_offsets": [...]}}, "DCP_VERSION": "1.0"}

`dcp.load(..., storage_reader=HuggingFaceStorageReader(path))` reads it at any world size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from ckptmap.core.gc_pause import paused_gc
from ckptmap.errors import PlanError
from ckptmap.formats.safetensors.file import RECORDS
from ckptmap.formats.safetensors.header_writer import emit
from ckptmap.protocols import OutFile, OutState, OutTensor, Setup, Slot
from ckptmap.tensors import Box, TensorInfo

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"

DCP_HF = Setup(
    "dcp-hf",
    layout="shard0",
    writer="dcp-hf",
    sharded=True,
    holds_extra=False,
    live="FSDP2",
    summary="DCP in safetensors form: one file of shards a rank, as HuggingFaceStorageWriter saves",
)

Entry = tuple[str, OutTensor, Box]


class DcpHfWriter:
    """Writes one file for each rank that has chunks. A key is the path segments joined with dots.

    Tied tensors are stored under both names, as DCP stores them. Encoding records go into the
    `__metadata__` of the first file.
    """

    name = "dcp-hf"
    one_file = False
    shares_storage = False

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the files in the order of ranks.

        Raise PlanError CKM114 if two tensors have one key, CKM203 for a dtype that safetensors lacks.
        """
        assert not state.extra, "safetensors has no place for what is not a tensor"
        with paused_gc():
            ranks = _by_rank(state.tensors)
            return [
                _file(rank, ranks[rank], state.records if i == 0 else {})
                for i, rank in enumerate(sorted(ranks))
            ]


def _by_rank(tensors: Sequence[OutTensor]) -> dict[int, list[Entry]]:
    ranks: dict[int, list[Entry]] = {}
    seen: set[str] = set()
    for tensor in tensors:
        key = ".".join(map(str, tensor.path))
        if key in seen:
            raise PlanError(
                "CKM114",
                f"two tensors would be written as {key!r}",
                "drop or rename one of them",
            )
        seen.add(key)
        for rank, box in tensor.chunks:
            ranks.setdefault(rank, []).append((key, tensor, box))
    return ranks


def _file(rank: int, entries: list[Entry], records: Mapping[str, Mapping[str, object]]) -> OutFile:
    """Return the file of a rank. Its tensors come by falling element size, so that each is aligned in a
    file that is mapped into memory."""
    entries = sorted(entries, key=lambda entry: -entry[1].info.itemsize)
    sharding = {key: {OFFSETS: list(box.offsets)} for key, _, box in entries}
    metadata = {SHARDING: json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
    if records:
        metadata[RECORDS] = json.dumps(records, sort_keys=True, separators=(",", ":"))
    infos = [TensorInfo(box.sizes, tensor.info.dtype) for _, tensor, box in entries]
    header = emit([key for key, _, _ in entries], infos, metadata)
    slots = []
    offset = len(header)
    for (_, tensor, box), info in zip(entries, infos, strict=True):
        slots.append(Slot(tensor.path, box, offset, info.nbytes))
        offset += info.nbytes
    name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    return OutFile(name, offset, slots, _sealed(header))


def _sealed(start: bytes) -> Callable[[Sequence[int], bytes | None], Iterable[tuple[int, bytes]]]:
    return lambda crcs, manifest: ((0, start),)
