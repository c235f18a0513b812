"""The order in which torch numbers the parameters of a live optimizer, by FQN."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.optimizer.local_state import owners
from ckptmap.live.optimizer.unwrap import is_offloaded, unwrapped

if TYPE_CHECKING:
    import torch


def live_order(
    optimizer: object, targets: Sequence[LiveTensor], model: torch.nn.Module,
    source: Container[str] = frozenset(),
) -> list[list[str]]:  # fmt: skip
    """Return the FQNs of the live optimizer's parameters by group, in the order in which torch numbers
    them. The tensors of a flat parameter come in the order of the model. A group may be empty, as
    Trainer's group without weight decay is for an adapter. A tensor has the name that `source` has for it, as the file
    of an adapter has other names than the model."""
    inner = unwrapped(optimizer)
    listed = [] if is_offloaded(inner) else inner.param_groups
    by_group: dict[int, list[LiveTensor]] = {id(group): [] for group in listed}
    whole = False
    for owner in owners(optimizer, targets):
        found = by_group.setdefault(id(owner.part.group), [])
        found += [target for target, _ in owner.members]
        whole = whole or len(owner.members) > 1
    groups = by_group.values()
    ordered = [in_module_order(model, group) if whole else group for group in groups]
    return [[next(iter(t.named_in(source)), t.fqn) for t in group] for group in ordered]


def in_module_order(model: torch.nn.Module, targets: Sequence[LiveTensor]) -> list[LiveTensor]:
    """Return the targets in the order of the model before FSDP1 made units of it, in which other
    programs number optimizer state."""
    position = {id(module): number for number, module in enumerate(model.modules())}
    return sorted(targets, key=lambda target: position[id(target.places[0][0])])
