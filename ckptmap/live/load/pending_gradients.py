"""Restores the gradients of an accumulation that a save came into (see `live/save/pending_gradients`).

reduced, cut as it was    -> `grad` of the parameter, cut as the live one is
this rank's own, whole    -> `grad`, or under FSDP the gradient that it has not reduced yet
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.live.model import flat_gradients, fsdp2_params
from ckptmap.live.model.flat_params import FlatParamTensor
from ckptmap.live.model.live_tensor import LiveTensor, like
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.optimizer.gradients import PENDING, REDUCED
from ckptmap.live.optimizer.unwrap import layers_of
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
    flat: dict[FlatParamTensor, dict[bool, LazyTensor]] = {}
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
        if isinstance(target, FlatParamTensor):
            flat.setdefault(target, {})[is_own] = lazy
            continue
        step = _own if is_own else _reduced
        found.steps.append(partial(step, target, lazy))
    found.names = list(dict.fromkeys(found.names))
    if flat:
        found.steps.append(partial(_flat, flat))
    if found.steps:
        found.steps.insert(0, lambda reader: _clear(targets))
    return found


def _unfit(target: LiveTensor | None, lazy: LazyTensor) -> str:
    """Return why the gradient cannot be the parameter's; empty: it can."""
    if target is None or target.is_buffer:
        return "the model has no such parameter"
    if isinstance(target, FlatParamTensor) and target.handle._offload_params:
        return "FSDP1 keeps gradients on the CPU (CPUOffload)"
    if not target.tensor.requires_grad:
        return "the parameter is frozen"
    if lazy.shape != tuple(target.tensor.shape):
        return f"is {list(lazy.shape)}, expected {list(target.tensor.shape)}"
    return ""


def _clear(targets: Sequence[LiveTensor]) -> None:
    """Drop the gradients that lie there: the next backward would add to those that were not saved."""
    for target in targets:
        if target.is_buffer:
            continue
        if isinstance(target, FlatParamTensor):
            flat_gradients.clear(target.handle)
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


def _flat(
    wanted: Mapping[FlatParamTensor, Mapping[bool, LazyTensor]], reader: TensorReader
) -> None:
    """Fill the gradients of FSDP1's flat parameters, each of all its tensors at once."""
    handles = {id(target.handle): target.handle for target in wanted}
    for handle in handles.values():
        mine = {target: found for target, found in wanted.items() if target.handle is handle}
        made: dict[bool, torch.Tensor] = {}
        for target, found in mine.items():
            for is_own, lazy in found.items():
                if is_own not in made:
                    made[is_own] = flat_gradients.blank(handle, is_own, lazy.torch_dtype)
                _fill_flat(target, lazy, made[is_own], is_own, reader)
        count = len(handle.flat_param._param_infos)
        absent = [n for n in range(count) if n not in {target.number for target in mine}]
        flat_gradients.put(handle, made.get(False), made.get(True), absent)


def _fill_flat(
    target: FlatParamTensor,
    lazy: LazyTensor,
    flat: torch.Tensor,
    is_own: bool,
    reader: TensorReader,
) -> None:
    if is_own:
        view = flat_gradients.own_views(target.handle, flat)[target.number]
        reader.dense(lazy, Box.whole(lazy.shape), view)
        return
    for box, view in target.windows(flat.narrow(0, target.at, target.count)):
        reader.dense(lazy, box, view)


def counting_note(names: Sequence[str], optimizer: object) -> list[str]:
    """Return a note where accelerate goes on with an accumulation: its count of micro-batches is in the
    Accelerator, which neither `save` nor `load` sees."""
    layers = () if optimizer is None else layers_of(optimizer)
    if not names or not any(type(layer).__name__ == "AcceleratedOptimizer" for layer in layers):
        return []
    return [
        "accelerate counts micro-batches in accelerator.step, which is not saved: set it to the number of them"
        " at the save, else it steps the optimizer at another one"
    ]
