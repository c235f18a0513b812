"""Find the parameters of a live optimizer inside its wrappers, and the family that the optimizer is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from ckptmap import registry
from ckptmap.errors import LoadError
from ckptmap.live.optimizer.family import OptimizerFamily, OptimizerParam, is_a
from ckptmap.live.optimizer.several_optimizers import SeveralOptimizers

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import (
        LiveOptimizer,
        OffloadedOptimizer,
        ParamGroup,
        PartitionedOptimizer,
    )


def unwrapped(optimizer: object) -> Any:
    """Return the optimizer inside of the wrappers of accelerate and other frameworks; of several by
    name, or in a container such as torchtitan's, each of them."""
    several = several_of(optimizer)
    if several:
        return SeveralOptimizers({name: unwrapped(one) for name, one in several.items()})
    return [*layers_of(optimizer)][-1]


def layers_of(optimizer: object) -> Iterator[Any]:
    """Yield an optimizer, or the wrappers around it from the outer one on and the optimizer last."""
    import torch

    yield optimizer
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        yield inner
        inner = getattr(inner, "optimizer", None)


def several_of(optimizer: object) -> Mapping[str, object]:
    """Return the optimizers of a dict, a list or a container by name; empty where it is one optimizer."""
    import torch

    def is_list(of: object) -> TypeGuard[Sequence[torch.optim.Optimizer]]:
        return isinstance(of, list | tuple) and all(
            isinstance(one, torch.optim.Optimizer) for one in of
        )

    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.by_name
    if isinstance(optimizer, Mapping):
        return optimizer
    listed = getattr(optimizer, "optimizers", optimizer)
    return {str(number): one for number, one in enumerate(listed)} if is_list(listed) else {}


def each_of(optimizer: object) -> list[Any]:
    """Return an `unwrapped` optimizer, or the several that it stands for."""
    if isinstance(optimizer, SeveralOptimizers):
        return list(optimizer.by_name.values())
    return [optimizer]


def family_of(optimizer: object) -> OptimizerFamily:
    """Return the family that an optimizer belongs to; the last one takes any."""
    families: tuple[OptimizerFamily, ...] = registry.optimizer_families()
    return next(family for family in families if family.claims(optimizer))


def is_offloaded(optimizer: object) -> TypeGuard[OffloadedOptimizer]:
    """Return whether this is torchao's CPUOffloadOptimizer, which has one optimizer for each parameter,
    on a copy of it in host memory."""
    return is_a(optimizer, "torchao", "CPUOffloadOptimizer")


def is_partitioned(optimizer: object) -> TypeGuard[PartitionedOptimizer]:
    """Return whether this is torch's ZeroRedundancyOptimizer, whose ranks step some of its parameters each,
    by an optimizer inside of it."""
    return is_a(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer")


def inner_optimizers(optimizer: LiveOptimizer) -> list[LiveOptimizer]:
    """Return the optimizers that keep the state: itself, or those inside of CPUOffloadOptimizer or
    ZeroRedundancyOptimizer."""
    if is_partitioned(optimizer):
        return [optimizer.optim]
    if not is_offloaded(optimizer):
        return [optimizer]
    inner = [*optimizer.optim_dict.values()]
    return inner if optimizer.d_opt is None else [*inner, optimizer.d_opt]


def _is_optimizer(optimizer: object) -> TypeGuard[LiveOptimizer]:
    return hasattr(optimizer, "param_groups")


def groups_of(optimizer: object) -> Iterator[ParamGroup]:
    """Yield every parameter group of an optimizer in order, also one without parameters; of several, one by
    one."""
    for one in each_of(optimizer):
        if _is_optimizer(one):
            # Those whose groups are set and hold all parameters.
            for holder in [one] if is_partitioned(one) else inner_optimizers(one):
                yield from holder.param_groups


def parts_of(optimizer: object) -> Iterator[OptimizerParam]:
    """Yield every parameter of the optimizer, in the order of its groups; of several, one by one."""
    for one in each_of(optimizer):
        yield from _parts_of_one(one)


def _parts_of_one(optimizer: object) -> Iterator[OptimizerParam]:
    if not _is_optimizer(optimizer):
        raise LoadError(
            "CKM508",
            f"{type(optimizer).__name__} is no torch.optim.Optimizer",
            "pass the optimizer itself",
        )
    if is_partitioned(optimizer):
        yield from _parts_of_partitioned(optimizer)
        return
    inner_ones = inner_optimizers(optimizer)
    copies: dict[int, torch.Tensor] = {}
    if is_offloaded(optimizer):
        copies = {id(host): device for device, host in optimizer.param_d2h_map.items()}
    for inner in inner_ones:
        family = family_of(inner)
        for group in inner.param_groups:
            for param in group["params"]:
                yield OptimizerParam(inner, family, group, param, copies.get(id(param), param))


def _parts_of_partitioned(optimizer: PartitionedOptimizer) -> Iterator[OptimizerParam]:
    """Yield all parameters; the optimizer inside has those of this rank, and takes over the outer groups'
    settings at each step."""
    inner = optimizer.optim
    family = family_of(inner)
    own = {id(param) for group in inner.param_groups for param in group["params"]}
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield OptimizerParam(inner, family, group, param, param, id(param) not in own)
