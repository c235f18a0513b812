"""Join the ShardedTensors of all ranks, which FSDP1 without a device mesh saves as SHARDED_STATE_DICT.

    N x ShardedTensor{[Shard [ceil(rows / N), cols] at (row, 0)]} -> [rows, cols]

Every shard states its offsets in the whole tensor. A rank without rows holds no shard. With HSDP
(hybrid sharding), replica ranks hold the same boxes: the first copy is kept, and the conversion
compares the others with it. Source: torch/distributed/_shard/sharded_tensor/api.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.core.formatting import counted
from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.rank_trees import RankValues
from ckptmap.sharding.dtensor_spec import chunks_in_whole, cut_rows
from ckptmap.sharding.sharded_tensor_spec import Sharded, is_sharded, read_sharded
from ckptmap.tensors import Box, Leaf, StoredTensor, TensorInfo

_ONE_SAVE = "copy the files of one save into a directory of their own"


class ShardedTensorLayout:
    """Joins the shards of ranks. Cuts a tensor by rows, as FSDP1 does."""

    name = "sharded-tensor"

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """Return (rank, box) of each rank that holds rows. Rank 0 holds a scalar or an empty tensor."""
        return cut_rows(info, world_size)

    def join(self, values: Sequence[Leaf], key: str) -> StoredTensor | None:
        """Return the whole tensor; None if no rank holds a ShardedTensor.

        Raise SourceError CKM110 if ranks are missing or belong to several saves, CKM112 if the
        shards do not tile the tensor, CKM113 if only some ranks hold a ShardedTensor.
        """
        if isinstance(values, RankValues) and not values.some(is_sharded):
            return None
        sharded = [value for value in values if is_sharded(value)]
        if not sharded:
            return None
        if len(sharded) < len(values):
            other = next(value for value in values if not is_sharded(value))
            raise SourceError(
                "CKM113",
                f"{key}: expected values of one kind, found ShardedTensor and {type(other).__name__} on"
                " different ranks",
                _ONE_SAVE,
            )
        parts = [read_sharded(value, key) for value in sharded]
        _check_one_save(parts, key)
        return _assemble(parts[0].info, [shard for part in parts for shard in part.shards], key)


def _check_one_save(parts: Sequence[Sharded], key: str) -> None:
    """Raise SourceError CKM110 unless all ranks are there and list the same shards."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.info, part.boxes, part.world) != (first.info, first.boxes, first.world):
            raise SourceError(
                "CKM110",
                f"{key}: rank {rank} was saved as {counted(len(part.boxes), 'shard')} of {part.info} by "
                f"{counted(part.world, 'rank')}, but rank 0 as {len(first.boxes)} of {first.info} by {first.world}",
                _ONE_SAVE,
            )
    if len(parts) < first.world:
        raise SourceError(
            "CKM110",
            f"{key}: is cut over {first.world} ranks, found the parts of {len(parts)}; "
            f"{counted(first.world - len(parts), 'rank file', 'is', 'are')} missing",
            "open the directory that holds the files of all ranks",
        )


def _assemble(
    info: TensorInfo, shards: Sequence[tuple[Box, StoredTensor]], key: str
) -> StoredTensor:
    """Return the tensor that the shards make. A later shard of the same box is a replica."""
    first: dict[Box, StoredTensor] = {}
    replicas: list[tuple[Box, StoredTensor]] = []
    for box, tensor in shards:
        if first.setdefault(box, tensor) is not tensor:
            replicas.append((box, tensor))
    wrong = prove_tiling(info.shape, list(first))
    if wrong is not None:
        raise SourceError("CKM112", f"{key}: {wrong}, expected shards that tile {info}", _ONE_SAVE)
    shares = tuple(tensor.share for tensor in first.values())
    return StoredTensor(
        info,
        lambda: [chunk for box, tensor in first.items() for chunk in chunks_in_whole(box, tensor)],
        [chunk for box, tensor in replicas for chunk in chunks_in_whole(box, tensor)],
        shares if shares and None not in shares else None,
    )
