"""The process groups of torch's wrappers, DDP and FSDP1 for two, which no device mesh describes.

The groups of FSDP1 and `replicate()` are not public. Where torch has moved them none is returned,
and an error of one rank is not told to the other ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptmap.live.model.flat_params import is_fsdp1

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE = "torch.distributed._composable.replicate"


def wrapped_groups(model: torch.nn.Module) -> Iterator[ProcessGroup | None]:
    """Yield the groups of DDP, of FSDP1 (with HYBRID_SHARD also that of its replicas), of `replicate()`."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            yield module.process_group
        elif is_fsdp1(module):
            yield module.process_group
            yield getattr(module, "_inter_node_pg", None)
        elif any(cls.__module__ == REPLICATE for cls in type(module).__mro__):
            yield _replicates(module)


def _replicates(module: torch.nn.Module) -> ProcessGroup | None:
    """Return the group of the DDP that `replicate()` makes at the first forward."""
    import torch

    try:
        from torch.distributed._composable.replicate import replicate

        state = replicate.state(module)
        if state.has_initialized:
            return state._ddp.process_group
        options = state._init_kwargs
    except (ImportError, AttributeError):
        return None
    mesh: DeviceMesh | None = options.get("device_mesh")
    if mesh is not None:
        return mesh.get_group(mesh_dim=0)
    return options.get("process_group") or torch.distributed.group.WORLD
