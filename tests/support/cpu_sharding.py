"""FSDP2 on the CPU: torch's default mesh is of the GPUs where the machine has some."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard


def fully_shard(module: nn.Module, *, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Return the module under `fully_shard`, over all ranks on the CPU unless a mesh is given."""
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torch_fully_shard(module, mesh=mesh, **options)
