"""torch's ShardedTensor, which FSDP1's sharded state dicts hold: boxes that ranks have of a tensor."""

from __future__ import annotations

from typing import Any

from ckptmap.live.optimizer.local_state import LocalShard, LocalTensor
from ckptmap.tensors import Box, Path, TensorInfo


def is_sharded(tensor: Any) -> bool:
    return any(cls.__name__ == "ShardedTensor" for cls in type(tensor).__mro__)


def holding(path: Path, tensor: Any) -> LocalTensor:
    """What this rank has of it. Ranks of HYBRID_SHARD that have the same are told by their boxes."""
    pieces = [
        LocalShard(
            Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)),
            shard.tensor.detach(),
        )
        for shard in tensor.local_shards()
    ]
    info = TensorInfo(tuple(tensor.size()), str(tensor.dtype).removeprefix("torch."))
    return LocalTensor(path, info, pieces, True)
