"""Tensors as FSDP1's own `load_state_dict` takes them, made without gathering a unit.

FULL_STATE_DICT      every rank has all of a tensor
SHARDED_STATE_DICT   the rows that torch.chunk gives a rank: a ShardedTensor, or a DTensor where the
                     model was wrapped with a device mesh
LOCAL_STATE_DICT     flat shards by unit, which have no FQNs: refused

Source: torch 2.13, torch/distributed/fsdp/_state_dict_utils.py and _shard_utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptmap.errors import LoadError
from ckptmap.live.model.cut_boxes import chunk_bounds
from ckptmap.live.model.flat_params import FlatParamTensor, handles
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.state_dict.load_state_dict import ShadowTensor
from ckptmap.mapping.wrappers import SEGMENTS, strip_wrappers
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

OWN_SEGMENTS = (SEGMENTS["fsdp1"], SEGMENTS["checkpoint"])
"""Segments that FSDP1 and checkpoint wrappers add to module paths, and leave out of state dicts."""

WHOLE_SCALAR = Box((), ())


@dataclass(frozen=True, eq=False)
class FlatShadow(ShadowTensor):
    """A tensor of a flat parameter, as a state dict of the model's state dict type holds it.

    flat   the tensor in the model
    owner  the FSDP1 module that holds the tensor
    rows   box of the tensor that this rank has in the state dict
    """

    flat: FlatParamTensor = field(kw_only=True)
    owner: FullyShardedDataParallel = field(kw_only=True)
    rows: Box = WHOLE_SCALAR

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor on meta, with shape and dtype."""
        return self.flat.tensor

    @property
    def local(self) -> torch.Tensor:
        made = self.made.get("")
        if made is not None:
            return made
        one = self.flat.shard.new_empty(1)  # shape and device are what is asked for, no memory
        return one.expand(self.rows.sizes)

    def windows(self, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        return [(self.rows, local)] if self.rows.numel else []

    @property
    def result(self) -> torch.Tensor | None:
        made = self.made.get("")
        if made is None or not is_sharded_type(self.owner):
            return made
        mesh = getattr(self.owner, "_device_mesh", None)
        if mesh is None:
            return _sharded(made, self.flat.shape, self.rows, self.owner)
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
        shape, stride = self.tensor.shape, self.tensor.stride()
        return DTensor.from_local(
            made, mesh, placements, run_check=False, shape=shape, stride=stride
        )


def shadows(model: torch.nn.Module, targets: Sequence[LiveTensor]) -> list[ShadowTensor]:
    """Return a shadow of every target. Raises LoadError CKM505 for a tensor that no state dict can hold,
    and for LOCAL_STATE_DICT."""
    owners = {id(handle): module for module, handle in handles(model)}
    return [
        _flat_shadow(target, owners[id(target.handle)])
        if isinstance(target, FlatParamTensor)
        else ShadowTensor.of(target)
        for target in targets
    ]


def _flat_shadow(flat: FlatParamTensor, owner: FullyShardedDataParallel) -> FlatShadow:
    if _type(owner) == "LOCAL_STATE_DICT":
        raise LoadError(
            "CKM505",
            "model: its state dict type is LOCAL_STATE_DICT, expected FULL or SHARDED_STATE_DICT",
            "set it with FullyShardedDataParallel.set_state_dict_type, or load with ckptmap.load",
        )
    rows = Box.whole(flat.shape)
    if is_sharded_type(owner):
        start, stop = chunk_bounds(flat.shape[0], owner.world_size, owner.rank)
        rows = Box((start, *rows.offsets[1:]), (stop - start, *rows.sizes[1:]))
    return FlatShadow(
        flat.names, flat.places, flat.is_buffer, None, {}, flat=flat, owner=owner, rows=rows,
        adapted=flat.adapted,
    )  # fmt: skip


def is_sharded_type(owner: FullyShardedDataParallel) -> bool:
    """Return whether the module's state dict has only this rank's rows; with NO_SHARD it never does."""
    return _type(owner) == "SHARDED_STATE_DICT" and owner.sharding_strategy.name != "NO_SHARD"


def _type(owner: FullyShardedDataParallel) -> str:
    return owner._state_dict_type.name


def _sharded(
    local: torch.Tensor, shape: Sequence[int], rows: Box, owner: FullyShardedDataParallel
) -> torch.Tensor:
    """Return a ShardedTensor over the ranks that share the module, made without communication."""
    import torch
    from torch.distributed import get_global_rank
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharded_tensor.shard import Shard

    group, world = owner.process_group, owner.world_size
    assert group is not None, "a unit of FSDP1 has a group"
    pieces = []
    for rank in range(world):
        start, stop = chunk_bounds(shape[0], world, rank)
        if stop > start:
            place = f"rank:{get_global_rank(group, rank)}/{local.device}"
            offsets, sizes = [start, *(0 for _ in shape[1:])], [stop - start, *shape[1:]]
            pieces.append(ShardMetadata(offsets, sizes, place))
    mine = [Shard(local, pieces[owner.rank])] if rows.numel else []
    whole = ShardedTensorMetadata(pieces, torch.Size(shape), TensorProperties(dtype=local.dtype))
    made: torch.Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, sharded_tensor_metadata=whole, process_group=group
    )
    return made


def own_keys(model: torch.nn.Module, targets: Sequence[LiveTensor]) -> dict[str, str]:
    """Return plain name -> the name in FSDP1's state dict, without making one, which would gather."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    keys = [
        f"{path}.{name}" if path else name
        for target in targets
        for module, name in target.places
        for path in paths[id(module)]
    ]
    return {
        plain: ".".join(part for part in key.split(".") if part not in OWN_SEGMENTS)
        for key, plain in strip_wrappers(keys, "model").items()
    }
