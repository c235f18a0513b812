"""The process groups over which torch's wrappers spread a module, as far as no mesh tells them.

FSDP1's and `replicate()`'s are not public: where torch has changed them, none is found, and errors
of one rank are not told to the ranks of that group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptmap.live.model.flat_params import is_fsdp1

if TYPE_CHECKING:
    import torch

REPLICATE = "torch.distributed._composable.replicate"


def wrapped_groups(model: torch.nn.Module) -> Iterator[Any]:
    """Those of DDP, of FSDP1 (with HYBRID_SHARD the one between its replicas, too), of `replicate()`."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            yield module.process_group
        elif is_fsdp1(module):
            yield module.process_group
            yield getattr(module, "_inter_node_pg", None)
        elif any(cls.__module__ == REPLICATE for cls in type(module).__mro__):
            yield _replicates(module)


def _replicates(module: torch.nn.Module) -> Any:
    """That of the DDP which `replicate()` makes at the first forward, or will make."""
    import torch

    try:
        from torch.distributed._composable.replicate import replicate

        state: Any = replicate.state(module)
        if state.has_initialized:
            return state._ddp.process_group
        options = state._init_kwargs
    except (ImportError, AttributeError):
        return None
    if options.get("device_mesh") is not None:
        return options["device_mesh"].get_group(mesh_dim=0)
    return options.get("process_group") or torch.distributed.group.WORLD
