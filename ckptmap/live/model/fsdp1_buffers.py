"""The dtype in which FSDP1 computes with a buffer: it casts buffers, in place, before its first forward.

    MixedPrecision(buffer_dtype=bfloat16)   built: float32   from the first forward on: bfloat16

So the same model has a buffer in one dtype before its first step and in another after it, and a
checkpoint that was saved while it trained has the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.live.model import module_walk
from ckptmap.live.model.flat_params import is_fsdp1

if TYPE_CHECKING:
    import torch


def forward_dtypes(model: torch.nn.Module) -> dict[int, str]:
    """Return the dtypes of floating buffers during a forward, by the id of the buffer, where FSDP1 casts
    them. As in torch, the innermost unit decides, and buffers of ignored modules are left alone."""
    units = [module for module in module_walk.modules(model) if is_fsdp1(module)]
    found: dict[int, str] = {}
    for unit in reversed(units):
        ignored: set[str] = getattr(unit, "_ignored_buffer_names", set())
        policy = getattr(unit, "mixed_precision", None)
        dtype = getattr(policy, "buffer_dtype", None)
        for name, buffer in unit.named_buffers():
            if id(buffer) in found:
                continue
            casts = dtype is not None and buffer.is_floating_point()
            is_ignored = bool(ignored) and _clean(name) in ignored
            found[id(buffer)] = str(dtype if casts and not is_ignored else buffer.dtype)
    return {key: dtype.removeprefix("torch.") for key, dtype in found.items()}


def _clean(name: str) -> str:
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    cleaned: str = clean_tensor_name(name)
    return cleaned
