"""Restores the gradients of an accumulation that a save came into (see `live/save/pending_gradients`).

reduced, cut as it was    -> `grad` of the parameter, cut as the live one is
this rank's own, whole    -> `grad`, or under FSDP2 the gradient that it has not reduced yet
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.live.model import fsdp2_params
from ckptmap.live.model.live_tensor import LiveTensor, like
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.optimizer.gradients import PENDING, REDUCED
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch


@dataclass
class GradientPlan:
    """The steps that restore gradients, the names of their parameters, and those that stay behind.

    left  names, each with the reason
    """

    steps: list[Callable[[TensorReader], None]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def run(self, reader: TensorReader) -> None:
        """Run every step, after the weights are loaded."""
        for step in self.steps:
            reader.run(step)


def plan(
    checkpoint: Checkpoint, targets: Sequence[LiveTensor], rank: int, fits: bool
) -> GradientPlan:
    """Return the plan for this rank. fits: do as many ranks load as have saved?

    The gradient of a single rank belongs to the same rank of as many."""
    found = GradientPlan()
    by_name = {name: target for target in targets for name in target.known}
    done: set[tuple[int, bool]] = set()
    for path, lazy in checkpoint.other.items():
        if path[0] != PENDING or len(path) != 3:
            continue
        is_own, fqn = path[1] != REDUCED, str(path[2])
        if is_own and fits and path[1] != f"rank{rank}":
            continue
        target = by_name.get(fqn)
        if target is not None and (id(target), is_own) in done:
            continue  # tied: the same gradient under another name
        reason = "it is that of one rank of another world size" if is_own and not fits else ""
        reason = reason or _unfit(target, lazy)
        if target is None or reason:
            found.left.append(f"{fqn}: {reason}")
            continue
        done.add((id(target), is_own))
        found.names.append(target.fqn)
        step = _own if is_own else _reduced
        found.steps.append(partial(step, target, lazy))
    found.names = list(dict.fromkeys(found.names))
    if found.steps:
        found.steps.insert(0, lambda reader: _clear(targets))
    return found


def _unfit(target: LiveTensor | None, lazy: LazyTensor) -> str:
    """Return why the gradient cannot be the parameter's; empty: it can."""
    if target is None or target.is_buffer:
        return "the model has no such parameter"
    if target.is_flat:
        return "FSDP1 keeps gradients in flat parameters"
    if not target.tensor.requires_grad:
        return "the parameter is frozen"
    if lazy.shape != tuple(target.tensor.shape):
        return f"is {list(lazy.shape)}, expected {list(target.tensor.shape)}"
    return ""


def _clear(targets: Sequence[LiveTensor]) -> None:
    """Drop the gradients that lie there: the next backward would add to those that were not saved."""
    for target in targets:
        if target.is_buffer or target.is_flat:
            continue
        target.tensor.grad = None
        if target.fsdp_param is not None:
            fsdp2_params.drop_unreduced(target.fsdp_param)


def _reduced(target: LiveTensor, lazy: LazyTensor, reader: TensorReader) -> None:
    import torch

    live = target.tensor
    local = torch.zeros(target.local.shape, dtype=live.dtype, device=target.local.device)
    for box, view in target.windows(local):
        reader.dense(lazy, box, view)
    live.grad = like(live, local)


def _own(target: LiveTensor, lazy: LazyTensor, reader: TensorReader) -> None:
    """Fill the whole gradient of this rank, in the dtype that it had."""
    import torch

    live, managed = target.tensor, target.fsdp_param
    device = target.local.device if managed is None else managed.device
    dtype: torch.dtype = live.dtype if managed is None else lazy.torch_dtype
    whole = torch.empty(lazy.shape, dtype=dtype, device=device)
    reader.dense(lazy, Box.whole(lazy.shape), whole)
    if managed is None:
        live.grad = whole
    else:
        managed.unsharded_accumulated_grad = whole
