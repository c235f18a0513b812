"""Build a one-dimensional ShardedTensor for `pickle.writer.dump`, without torch: the objects that torch
2.13 pickles it as.

FSDP1 saves a flat parameter with LOCAL_STATE_DICT as such a tensor: one dim, and a shard on each rank
that holds elements (`_local_post_state_dict_hook`, `init_from_local_shards`). torch loads it in a
process group of the same world size only. Sources, below torch/distributed/_shard: sharded_tensor/api.py
(`ShardedTensor.__getstate__`), sharded_tensor/metadata.py, metadata.py, sharding_spec.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.formats.pickle.named_values import Call, Global, Instance
from ckptmap.formats.pickle.reader import Device, DType, Size
from ckptmap.formats.pickle.writer import StorageTensor

_SHARD = "torch.distributed._shard"
_TENSOR = f"{_SHARD}.sharded_tensor"
_CLASS = Global(f"{_TENSOR}.api", "ShardedTensor")
DEVICE = "cpu"
"""Device of the shards. torch.load(map_location=...) moves the tensors."""

Shards = Sequence[tuple[int, int, int]]
"""(rank, offset, numel) of every shard that is not empty."""


def flat_sharded(
    dtype: str, numel: int, shards: Shards, local: StorageTensor | None, rank: int, world: int
) -> Call:
    """Return the call of `torch._tensor._rebuild_from_type_v2` that makes a ShardedTensor [numel]
    with the shard of `rank`, if that rank has one."""
    strided = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    outer = (_CLASS, DType(dtype), (numel,), (1,), 0, strided, Device(DEVICE), True)
    shards_metadata = [_shard_metadata(shard) for shard in shards]
    own_shard = next((shard for shard in shards if shard[0] == rank), None)
    own_shards = []
    if own_shard is not None:
        state = {"tensor": local, "metadata": _shard_metadata(own_shard)}
        own_shards.append(Instance(Global(f"{_TENSOR}.shard", "Shard"), (None, state)))
    value = (own_shards, _metadata(dtype, numel, shards_metadata, strided), _group(rank, world),
             _spec(numel, shards, shards_metadata), False)  # fmt: skip
    rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (rebuild, _CLASS, outer, value))


def _shard_metadata(shard: tuple[int, int, int]) -> Instance:
    rank, offset, numel = shard
    state = {"shard_offsets": [offset], "shard_sizes": [numel], "placement": _remote(rank)}
    return Instance(Global(f"{_SHARD}.metadata", "ShardMetadata"), (None, state))


def _remote(rank: int) -> Instance:
    state = {"_worker_name": None, "_rank": rank, "_device": Device(DEVICE)}
    return Instance(Global("torch.distributed.remote_device", "_remote_device"), state)


def _metadata(dtype: str, numel: int, listed: list[Instance], strided: Call) -> Instance:
    memory = Call(Global(f"{_TENSOR}.metadata", "MEM_FORMAT_ENCODING"), (0,))
    properties = (DType(dtype), strided, True, memory, False)
    state = {
        "shards_metadata": listed,
        "size": Size((numel,)),
        "tensor_properties": Instance(
            Global(f"{_TENSOR}.metadata", "TensorProperties"), properties
        ),
    }
    return Instance(Global(f"{_TENSOR}.metadata", "ShardedTensorMetadata"), state)


def _group(rank: int, world: int) -> Instance:
    """Return the ProcessGroupState of a rank. Pickle protocol 2 has no name for a nested class, so the
    pickle gets it as an attribute of ShardedTensor."""
    cls = Call(Global("__builtin__", "getattr"), (_CLASS, "ProcessGroupState"))
    state = {
        "local_rank": rank,
        "global_rank": rank,
        "local_world_size": world,
        "global_world_size": world,
    }
    return Instance(cls, state)


def _spec(numel: int, shards: Shards, listed: list[Instance]) -> Instance:
    """Return the sharding spec that torch infers: ChunkShardingSpec if the shards are those of
    torch.chunk, else EnumerableShardingSpec, which lists them."""
    step = -(-numel // len(shards))
    rooms = f"{_SHARD}.sharding_spec"
    chunked = len(shards) > 1 and all(
        (offset, size) == (step * index, min(step, numel - step * index))
        for index, (_, offset, size) in enumerate(shards)
    )
    if chunked:
        state = {"dim": 0, "placements": [_remote(rank) for rank, _, _ in shards]}
        return Instance(Global(f"{rooms}.chunk_sharding_spec", "ChunkShardingSpec"), state)
    return Instance(Global(f"{rooms}.api", "EnumerableShardingSpec"), {"shards": listed})
