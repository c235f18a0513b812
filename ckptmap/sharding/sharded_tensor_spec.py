"""Read a pickled ShardedTensor without torch: its shape, and the shards that this rank holds.

torch/distributed/_shard/sharded_tensor/api.py `ShardedTensor.__getstate__`:
(local_shards, metadata, ProcessGroupState, sharding_spec, init_rrefs). FSDP1 writes it for
SHARDED_STATE_DICT (the chunks of dim 0) and LOCAL_STATE_DICT (one-dimensional flat parameters)
where it was given no device mesh. A rank that holds no rows has no shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeGuard

from ckptmap.errors import SourceError
from ckptmap.sharding.pickled_mesh import malformed
from ckptmap.tensors import Box, Leaf, Opaque, StoredTensor, TensorInfo

CLASS = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


@dataclass(frozen=True)
class Sharded:
    """The ShardedTensor of one rank.

    shards  the boxes that this rank holds, each with its tensor
    boxes   the shards of all ranks, which the metadata of every rank lists
    rank    the rank that wrote the file, as the file says
    world   how many ranks the job had
    """

    info: TensorInfo
    shards: tuple[tuple[Box, StoredTensor], ...]
    boxes: tuple[Box, ...]
    rank: int
    world: int


def is_sharded(leaf: Leaf) -> TypeGuard[Opaque]:
    """Return whether the value is a pickled torch.distributed ShardedTensor."""
    return isinstance(leaf, Opaque) and leaf.class_name == CLASS


def read_sharded(leaf: Opaque, key: str) -> Sharded:
    """Return what a pickled ShardedTensor says. Raises SourceError CKM112 if it is malformed, or if a
    shard has another shape than its metadata says."""
    state = leaf.state
    if leaf.info is None or not isinstance(state, tuple) or len(state) < 3:
        raise malformed(key, "a ShardedTensor without its shape or state")
    shards, metadata = state[0], _attributes(state[1]).get("shards_metadata")
    if not isinstance(shards, list) or not isinstance(metadata, list):
        raise malformed(key, "a ShardedTensor without its shards")
    ndim = len(leaf.info.shape)
    group = _attributes(state[2])
    rank, world = group.get("global_rank"), group.get("global_world_size")
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world:
        raise malformed(key, f"a ShardedTensor of rank {rank!r:.20} of {world!r:.20}")
    own_shards = tuple(_shard(shard, leaf.info, key) for shard in shards)
    boxes = tuple(_box(_attributes(entry), ndim, key) for entry in metadata)
    return Sharded(leaf.info, own_shards, boxes, rank, world)


def check_writer(leaves: Iterable[Leaf], rank: int, file: str) -> int | None:
    """Return how many ranks the job of this file had, by its first ShardedTensor; None if it has none.

    Raises SourceError CKM110 if the file was written by another rank than its name says.
    """
    for leaf in islice((leaf for leaf in leaves if is_sharded(leaf)), 1):
        metadata = read_sharded(leaf, file)
        if metadata.rank != rank:
            raise other_writer(file, metadata.rank, rank)
        return metadata.world
    return None


def other_writer(file: str, wrote: int, rank: int) -> SourceError:
    """Return the error for the file of a rank that states the number of another rank."""
    return SourceError(
        "CKM110",
        f"{file}: was written by rank {wrote}, its name says rank {rank}",
        "give each file the name that its rank wrote it under",
    )


def _shard(shard: object, whole: TensorInfo, key: str) -> tuple[Box, StoredTensor]:
    fields = _attributes(shard)
    tensor = fields.get("tensor")
    box = _box(_attributes(fields.get("metadata")), len(whole.shape), key)
    if not isinstance(tensor, StoredTensor):
        raise malformed(key, "a shard that holds no plain tensor")
    if tensor.info != TensorInfo(box.sizes, whole.dtype):
        raise SourceError(
            "CKM112",
            f"{key}: a shard holds {tensor.info}, expected {whole.dtype}{list(box.sizes)} at "
            f"{list(box.offsets)}",
            "the file is damaged, or its tensors were cast after they were cut",
        )
    return box, tensor


def _box(metadata: Mapping[object, object], ndim: int, key: str) -> Box:
    offsets, sizes = (_ints(metadata.get(name)) for name in ("shard_offsets", "shard_sizes"))
    if offsets is None or sizes is None or not len(offsets) == len(sizes) == ndim:
        raise malformed(key, f"a shard without {ndim} offsets and sizes")
    return Box(offsets, sizes)


def _ints(values: object) -> tuple[int, ...] | None:
    if isinstance(values, list | tuple) and all(type(n) is int and n >= 0 for n in values):
        return tuple(values)
    return None


def _attributes(value: object) -> Mapping[object, object]:
    """Return the attributes of an inert object: its state, or `slots` if the state is (None, slots)."""
    state = value.state if isinstance(value, Opaque) else None
    if isinstance(state, Sequence) and len(state) == 2 and state[0] is None:
        state = state[1]
    return state if isinstance(state, Mapping) else {}
