"""The settings of a run that decide the bits of its gradients: the parameters that are trained, the
wrappers that average over ranks, and precisions. `save` records them, `load(exact=True)` compares them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeGuard

from ckptmap.core.class_names import is_a
from ckptmap.live.model import module_walk
from ckptmap.live.model.flat_params import FlatParamTensor, is_fsdp1
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.optimizer import gradient_hooks

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel


PENDING = "gradients"
"""Key of the gradients of an accumulation among the extra values."""
REDUCED = "reduced"
"""Key of those below it that are averaged over ranks already."""

AVERAGED = "averaged by"
PRECISION = "mixed precision"
"""Names of settings."""


def described(model: torch.nn.Module, targets: Sequence[LiveTensor]) -> dict[str, object]:
    """Return the settings as plain values."""
    policies = (policy for m in module_walk.modules(model) if (policy := _policy(m)) is not None)
    different = {id(policy): policy for policy in policies}  # most modules share one
    return {
        AVERAGED: _averagers(model),
        PRECISION: sorted(set(filter(None, map(_text, different.values())))),
        "parameters that are trained": _trained(targets),
        **gradient_hooks.described(model),
    }


def _averagers(model: torch.nn.Module) -> list[str]:
    """Return the wrappers that average over replicas; those of FSDP show in how tensors are cut."""
    names = {
        type(module).__name__
        for module in module_walk.modules(model)
        if is_ddp(module) and module.process_group.size() > 1
    }
    return sorted(names)


def is_ddp(module: torch.nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Return whether DDP wraps the module, without an import of torch.distributed."""
    return is_a(module, "DistributedDataParallel")


def _policy(module: Any) -> Any:
    """Return the mixed-precision settings of a module; None: it has none."""
    if is_fsdp1(module) or is_ddp(module):
        return module.mixed_precision
    return module._get_fsdp_state()._mp_policy if is_a(module, "FSDPModule") else None


def _text(policy: Any) -> str:
    """Return what of mixed-precision settings is not the default; empty: nothing."""
    default = type(policy)()
    settings = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return " ".join(
        f"{name}={value}" for name, value in settings.items() if value != getattr(default, name)
    )


def _trained(targets: Sequence[LiveTensor]) -> str:
    """Return the count of the trained parameters, and a digest of their names."""
    names = sorted(target.fqn for target in targets if is_trained(target))
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return f"{len(names)} ({digest})"


def is_trained(target: LiveTensor) -> bool:
    """Return whether a tensor of the model requires gradients."""
    live = (
        target.param if isinstance(target, FlatParamTensor) and target.param is not None else None
    )
    return bool((target.tensor if live is None else live).requires_grad)
