"""Whether FSDP2 cuts a parameter by rows, so that each rank can hold quantized rows of it."""

from __future__ import annotations

from ckptmap.live.model import fsdp2_params
from ckptmap.live.model.live_tensor import LiveTensor, is_dtensor


def row_shard(target: LiveTensor, kind: str) -> tuple[int, int] | str:
    """Return (rank, world size) of a DTensor that FSDP2 cuts by rows; a text: why a weight of the form
    `kind` cannot be cut so."""
    tensor = target.tensor
    if target.fsdp_param is None or not is_dtensor(tensor):
        return f"a DTensor outside of fully_shard has no way to compute with {kind}"
    if fsdp2_params.is_model_parallel(target.fsdp_param):
        return f"a tensor-parallel weight has no way to compute with {kind}"
    if fsdp2_params.reshards_apart(target.fsdp_param):
        return f"reshard_after_forward to a smaller mesh does not support {kind}"
    coordinate = tensor.device_mesh.get_coordinate()
    shards = [i for i, p in enumerate(tensor.placements) if not p.is_replicate()]
    if coordinate is None or len(shards) != 1 or not tensor.placements[shards[0]].is_shard(0):
        return f"placements {tensor.placements} are not rows over one dim of the mesh"
    return coordinate[shards[0]], tensor.device_mesh.size(shards[0])
