"""Gradients of an accumulation that a save comes into: told of, and saved on request.

    extra.gradients.reduced.<FQN>   cut as the parameter: averaged over ranks already, or of one rank
    extra.gradients.rank0.<FQN>     the whole gradient of one rank, which no collective has averaged

DDP keeps the second kind in `grad` under `no_sync()`. FSDP2 keeps it beside the parameter under
`set_requires_gradient_sync(False)`, in `unsharded_accumulated_grad` where it reduces in another dtype,
else in the `grad` of its unsharded parameter (torch 2.13, `FSDPParam.to_accumulated_grad_if_needed`).

Gradients that lie there after a step are normal. What tells of an accumulation is a flag of a wrapper or
of accelerate, or a gradient that FSDP2 has not reduced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptmap.errors import ArgumentError, LoadError
from ckptmap.live.model import flat_gradients, module_walk
from ckptmap.live.model.flat_params import FlatParamTensor, is_fsdp1
from ckptmap.live.model.fsdp2_params import fsdp_groups, unreduced
from ckptmap.live.model.live_tensor import LiveTensor, is_dtensor
from ckptmap.live.optimizer.family import local_of
from ckptmap.live.optimizer.gradients import PENDING, REDUCED, is_ddp
from ckptmap.live.optimizer.local_state import (
    LocalShard,
    LocalState,
    LocalTensor,
    info_of,
)
from ckptmap.live.save.replica_digests import Digest, digests_of
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

HINT = (
    "save after the optimizer's step, or pass gradients=True to save them, or gradients=False to leave"
    " them out"
)


@dataclass(frozen=True, eq=False)
class Pending:
    """The gradient of one parameter. is_own: it is this rank's alone, and whole."""

    target: LiveTensor
    gradient: torch.Tensor
    is_own: bool


@dataclass(frozen=True)
class Evidence:
    """What tells that gradients are pending on this rank.

    text     a phrase; empty: nothing does
    digest   of DDP's gradients, after a forward without synchronization: replicas that differ have not
             been averaged; (): not taken
    """

    text: str = ""
    digest: Digest = ()


def evidence(model: torch.nn.Module, targets: Sequence[LiveTensor]) -> Evidence:
    """Return what tells on this rank that an accumulation is under way."""
    if text := _unreduced_by_fsdp2(model):
        return Evidence(text)
    if flat_gradients.is_unreduced(model):
        return Evidence("FSDP1 has gradients that it has not reduced (no_sync)")
    gradients = [g for target in targets if (g := _gradient(target)) is not None]
    if not gradients:
        return Evidence()
    if text := _flag(model):
        return Evidence(text)
    ddp = [module for module in module_walk.modules(model) if is_ddp(module)]
    # After a backward inside of no_sync(), and also after a forward in evaluation.
    if all(getattr(module, "require_forward_param_sync", True) for module in ddp):
        return Evidence()
    plain = [g for g in gradients if not is_dtensor(g)]
    pieces = [[LocalShard(Box.whole(tuple(g.shape)), g)] for g in plain]
    return Evidence(digest=tuple(one for some in digests_of(pieces) for one in some))


def told(found: Sequence[Evidence]) -> str:
    """Return what the evidence of all ranks tells, as a phrase; empty: nothing."""
    first = next((one.text for one in found if one.text), "")
    if not first and len({one.digest for one in found if one.digest}) > 1:
        return "DDP's gradients differ between ranks"
    return first


def refuse(text: str) -> None:
    """Raise ArgumentError CKM518 where gradients are pending and the caller has not said what becomes
    of them."""
    if text:
        raise ArgumentError(
            "CKM518", f"model: is in the middle of gradient accumulation: {text}", HINT
        )


def _flag(model: torch.nn.Module) -> str:
    """Return the flag that says that gradients are not synchronized now; empty: none does."""
    accelerate: Any = sys.modules.get("accelerate.state")
    shared = getattr(getattr(accelerate, "GradientState", None), "_shared_state", None) or {}
    if not shared.get("sync_gradients", True):
        return "accelerate's sync_gradients is False"
    for module in module_walk.modules(model):
        if is_ddp(module) and not module.require_backward_grad_sync:
            return "DDP is inside of no_sync()"
        if is_fsdp1(module) and not getattr(module, "_sync_gradients", True):
            return "FSDP1 is inside of no_sync()"
    return ""


def _unreduced_by_fsdp2(model: torch.nn.Module) -> str:
    for group in fsdp_groups(model):
        if any(unreduced(param) is not None for param in group.fsdp_params):
            return "FSDP2 has gradients that it has not reduced (set_requires_gradient_sync)"
        if getattr(group, "_partial_reduce_output", None) is not None:
            return "FSDP2 has gradients that it has reduced in part (set_requires_all_reduce)"
    return ""


def _gradient(target: LiveTensor) -> torch.Tensor | None:
    """Return `grad` of the live parameter."""
    if target.is_buffer:
        return None
    if isinstance(target, FlatParamTensor):
        found = next((gradient for gradient, _ in flat_gradients.held(target)), None)
    else:
        found = target.tensor.grad
    return None if found is None else found.detach()


# ------------------------------------------------------------------------------- saved


def hold(
    state: LocalState, model: torch.nn.Module, targets: Sequence[LiveTensor], rank: int, world: int
) -> None:
    """Add every gradient to what this rank saves. Raises LoadError CKM505 for those that cannot be."""
    for one in _pending(model, targets, world):
        target, gradient = one.target, one.gradient.detach()
        for fqn in target.names:
            if one.is_own:
                path = ("extra", PENDING, f"rank{rank}", fqn)
                piece = LocalShard(Box.whole(tuple(gradient.shape)), gradient)
                info = info_of(gradient.shape, gradient)
                state.holdings.append(LocalTensor(path, info, [piece], True))
            else:
                path = ("extra", PENDING, REDUCED, fqn)
                local = local_of(gradient)
                pieces = [LocalShard(box, view) for box, view in target.windows(local)]
                primary = target.is_primary if target.is_cut else None
                info = info_of(target.tensor.shape, local)
                state.holdings.append(LocalTensor(path, info, pieces, primary, True))


def _pending(
    model: torch.nn.Module, targets: Sequence[LiveTensor], world: int
) -> Iterator[Pending]:
    for group in fsdp_groups(model):
        if getattr(group, "_partial_reduce_output", None) is not None:
            raise _cannot("FSDP2 has reduced them in part", "set_requires_all_reduce(True)")
    ddp = [module for module in module_walk.modules(model) if is_ddp(module)]
    is_averaged = ddp and all(
        module.require_backward_grad_sync and module.require_forward_param_sync for module in ddp
    )
    for target in targets:
        if isinstance(target, FlatParamTensor):
            if target.handle._offload_params:
                raise _cannot(
                    "FSDP1 keeps them on the CPU (CPUOffload)", "gradients beside the shards"
                )
            yield from (Pending(target, *one) for one in flat_gradients.held(target))
            continue
        gradient, own = _gradient(target), unreduced(target.fsdp_param)
        if gradient is not None:
            if is_dtensor(gradient) and gradient.placements != target.tensor.placements:  # type: ignore[attr-defined]
                raise _cannot(
                    f"that of {target.fqn} is placed as {gradient.placements}", "DTensors"
                )
            yield Pending(target, gradient, world > 1 and not target.is_cut and not is_averaged)
        if own is not None:
            if is_dtensor(own):
                raise _cannot(f"that of {target.fqn} is cut by tensor parallelism", "FSDP2 alone")
            yield Pending(target, own, True)


def _cannot(why: str, instead: str) -> LoadError:
    return LoadError(
        "CKM505",
        f"model: its pending gradients cannot be saved: {why}, expected {instead}",
        "save after the optimizer's step, or pass gradients=False",
    )
