"""Find the parameters of a live optimizer inside its wrappers, and the family that the optimizer is of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from ckptmap import registry
from ckptmap.errors import LoadError
from ckptmap.live.optimizer.family import OptimizerFamily, OptimizerParam, is_a

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import LiveOptimizer, OffloadedOptimizer


def unwrapped(optimizer: object) -> Any:
    """Return the optimizer inside of the wrappers of accelerate and other frameworks."""
    import torch

    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def family_of(optimizer: object) -> OptimizerFamily:
    """Return the family that an optimizer belongs to; the last one takes any."""
    families: tuple[OptimizerFamily, ...] = registry.optimizer_families()
    return next(family for family in families if family.claims(optimizer))


def is_offloaded(optimizer: object) -> TypeGuard[OffloadedOptimizer]:
    """Return whether this is torchao's CPUOffloadOptimizer, which has one optimizer for each parameter,
    on a copy of it in host memory."""
    return is_a(optimizer, "torchao", "CPUOffloadOptimizer")


def inner_optimizers(optimizer: LiveOptimizer) -> list[LiveOptimizer]:
    """Return the optimizers that keep the state: itself, or those inside of CPUOffloadOptimizer."""
    if not is_offloaded(optimizer):
        return [optimizer]
    inner = [*optimizer.optim_dict.values()]
    return inner if optimizer.d_opt is None else [*inner, optimizer.d_opt]


def _is_optimizer(optimizer: object) -> TypeGuard[LiveOptimizer]:
    return hasattr(optimizer, "param_groups")


def parts_of(optimizer: object) -> Iterator[OptimizerParam]:
    """Yield every parameter of the optimizer, in the order of its groups."""
    if not _is_optimizer(optimizer):
        raise LoadError(
            "CKM508",
            f"{type(optimizer).__name__} is no torch.optim.Optimizer",
            "pass the optimizer itself",
        )
    inner_ones = inner_optimizers(optimizer)
    copies: dict[int, torch.Tensor] = {}
    if is_offloaded(optimizer):
        copies = {id(host): device for device, host in optimizer.param_d2h_map.items()}
    for inner in inner_ones:
        family = family_of(inner)
        for group in inner.param_groups:
            for param in group["params"]:
                yield OptimizerParam(inner, family, group, param, copies.get(id(param), param))
