"""torch's ShardedTensor, of which FSDP1's sharded state dicts are made: the boxes of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from ckptmap.live.optimizer.local_state import LocalShard, LocalTensor
from ckptmap.tensors import Box, Path, TensorInfo

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor


def is_sharded(tensor: object) -> TypeGuard[ShardedTensor]:
    return any(cls.__name__ == "ShardedTensor" for cls in type(tensor).__mro__)


def holding(path: Path, tensor: ShardedTensor) -> LocalTensor:
    """Return the boxes of this rank. Replicas of HYBRID_SHARD are recognised by equal boxes."""
    pieces = [
        LocalShard(
            Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)),
            shard.tensor.detach(),
        )
        for shard in tensor.local_shards()
    ]
    info = TensorInfo(tuple(tensor.size()), str(tensor.dtype).removeprefix("torch."))
    return LocalTensor(path, info, pieces, True)
