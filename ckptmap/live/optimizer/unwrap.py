"""A live optimizer taken apart: below its wrappers, by family, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptmap import registry
from ckptmap.errors import LoadError
from ckptmap.live.optimizer.family import OptimizerFamily, OptimizerParam, is_a


def unwrapped(optimizer: Any) -> Any:
    """Below what accelerate and the like put around it."""
    import torch

    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def family_of(optimizer: Any) -> OptimizerFamily:
    """Return the family that an optimizer belongs to; the last one takes any."""
    families: tuple[OptimizerFamily, ...] = registry.optimizer_families()
    return next(family for family in families if family.claims(optimizer))


def is_offloaded(optimizer: Any) -> bool:
    """torchao's CPUOffloadOptimizer: one optimizer a parameter, each on a copy in host memory."""
    return is_a(optimizer, "torchao", "CPUOffloadOptimizer")


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Those that keep the state: itself, or the many of CPUOffloadOptimizer."""
    if not is_offloaded(optimizer):
        return [optimizer]
    on_device = [optimizer.d_opt] * (optimizer.d_opt is not None)
    return [*optimizer.optim_dict.values(), *on_device]


def parts_of(optimizer: Any) -> Iterator[OptimizerParam]:
    """Every parameter of it, in the order of its groups."""
    if not hasattr(optimizer, "param_groups"):
        raise LoadError(
            "CKM508",
            f"{type(optimizer).__name__} is no torch.optim.Optimizer",
            "pass the optimizer itself",
        )
    copies = {}
    if is_offloaded(optimizer):
        copies = {id(host): device for device, host in optimizer.param_d2h_map.items()}
    for inner in inner_optimizers(optimizer):
        family = family_of(inner)
        for group in inner.param_groups:
            for param in group["params"]:
                yield OptimizerParam(inner, family, group, param, copies.get(id(param), param))
