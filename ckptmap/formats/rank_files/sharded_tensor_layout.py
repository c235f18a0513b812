"""ShardedTensors, one a rank: what FSDP1 saves as SHARDED_STATE_DICT without a device mesh.

    N x ShardedTensor{[Shard [ceil(rows / N), cols] at (row, 0)]} -> [rows, cols]

Every shard says where it belongs, so nothing is computed. A rank without rows holds no shard; the
ranks of HSDP's replicas hold the same boxes, of which the first is kept and the others compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.rank_trees import RankValues
from ckptmap.sharding.dtensor_spec import cut_rows, moved
from ckptmap.sharding.sharded_tensor_spec import Sharded, is_sharded, read_sharded
from ckptmap.tensors import Box, Leaf, StoredTensor, TensorInfo

_ONE_SAVE = "these files are not of one save; copy those of one save into a directory of their own"


class ShardedTensorLayout:
    """Joins ShardedTensors; cuts as they are cut, by rows."""

    name = "sharded-tensor"

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """One box for each rank that holds rows. A scalar, or an empty tensor, is rank 0's."""
        return cut_rows(info, world_size)

    def join(self, values: Sequence[Leaf], key: str) -> StoredTensor | None:
        """None where no rank holds a ShardedTensor.

        Raises SourceError CKM110 where ranks are missing or of several saves, CKM112 where the
        shards do not fill the tensor, CKM113 where ranks hold different kinds of values.
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
                f"{key}: ShardedTensor and {type(other).__name__} on different ranks, expected one"
                " kind",
                _ONE_SAVE,
            )
        parts = [read_sharded(value, key) for value in sharded]
        _check_one_save(parts, key)
        return _assemble(parts[0].info, [shard for part in parts for shard in part.shards], key)


def _check_one_save(parts: Sequence[Sharded], key: str) -> None:
    """All ranks are there, and all list the same shards."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.info, part.boxes, part.world) != (first.info, first.boxes, first.world):
            raise SourceError(
                "CKM110",
                f"{key}: rank {rank} was saved as {len(part.boxes)} shards of {part.info} by "
                f"{part.world} ranks, rank 0 as {len(first.boxes)} of {first.info} by {first.world}",
                _ONE_SAVE,
            )
    if len(parts) < first.world:
        raise SourceError(
            "CKM110",
            f"{key}: is cut over {first.world} ranks, found the parts of {len(parts)}; "
            f"{first.world - len(parts)} rank files are missing",
            "open the directory that holds the files of all ranks",
        )


def _assemble(
    info: TensorInfo, shards: Sequence[tuple[Box, StoredTensor]], key: str
) -> StoredTensor:
    """One tensor of shards; those of a box that is there already are replicas of it."""
    first: dict[Box, StoredTensor] = {}
    replicas: list[tuple[Box, StoredTensor]] = []
    for box, tensor in shards:
        if first.setdefault(box, tensor) is not tensor:
            replicas.append((box, tensor))
    wrong = prove_tiling(info.shape, list(first))
    if wrong is not None:
        raise SourceError("CKM112", f"{key}: {wrong}, expected to fill {info}", _ONE_SAVE)
    shares = tuple(tensor.share for tensor in first.values())
    return StoredTensor(
        info,
        lambda: [chunk for box, tensor in first.items() for chunk in moved(box, tensor)],
        [chunk for box, tensor in replicas for chunk in moved(box, tensor)],
        shares if shares and None not in shares else None,
    )
