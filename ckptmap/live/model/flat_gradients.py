"""Gradients that FSDP1 keeps in flat parameters between two micro-batches (torch 2.13).

    flat_param.grad, as large as the shard      averaged over ranks, and cut
    flat_param.grad, as large as the whole      of this rank alone: of a backward inside of no_sync()
    flat_param._saved_grad_shard                averaged before, while `grad` is of this rank alone

With `use_orig_params=True` the `grad` of a parameter is a view of `flat_param.grad`, and decides: torch
drops that of the flat parameter once no parameter has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptmap.live.model.flat_params import FlatParamTensor, handles

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp._flat_param import FlatParamHandle

SAVED = "_saved_grad_shard"


def held(target: FlatParamTensor) -> list[tuple[torch.Tensor, bool]]:
    """Return the gradients of a tensor that this rank has, each with whether it is the rank's alone and
    whole; else it is `count` elements."""
    found: list[tuple[torch.Tensor, bool]] = []
    flat = target.handle.flat_param
    saved = getattr(flat, SAVED, None)
    if saved is not None and target.count and target.tensor.requires_grad:
        found.append((saved.detach().narrow(0, target.at, target.count), False))
    gradient = flat.grad if target.param is None else target.param.grad
    if gradient is None:
        return found
    if is_own(target.handle):
        whole = gradient.detach()
        if target.param is None:
            whole = own_views(target.handle, whole)[target.number]
        found.append((whole, True))
    elif target.count:
        part = gradient.detach().view(-1)
        found.append(
            (part.narrow(0, target.at, target.count) if target.param is None else part, False)
        )
    return found


def is_own(handle: FlatParamHandle) -> bool:
    """Return whether `grad` of the flat parameter has not been averaged. Without shards nobody can tell:
    it counts as this rank's own."""
    gradient = handle.flat_param.grad
    if not handle.uses_sharded_strategy:
        return handle.world_size > 1
    return gradient is not None and gradient.size() == handle.flat_param._unpadded_unsharded_size


def is_unreduced(model: torch.nn.Module) -> bool:
    """Return whether a backward inside of no_sync() has left gradients that no rank has averaged."""
    for _, handle in handles(model):
        flat = handle.flat_param
        own = [flat] if not handle._use_orig_params else flat._params or []
        alive = any(param.grad is not None for param in own)
        if alive and handle.uses_sharded_strategy and is_own(handle):
            return True
    return False


def clear(handle: FlatParamHandle) -> None:
    """Drop the gradients that lie there."""
    flat = handle.flat_param
    flat.grad = None
    if hasattr(flat, SAVED):
        delattr(flat, SAVED)
    for param in [*(flat._params or ()), *(flat._shared_params or ())]:
        param.grad = None


def blank(handle: FlatParamHandle, whole: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros for the gradient of a flat parameter: `whole`, or this rank's shard of it."""
    import torch

    flat = handle.flat_param
    size = flat._unpadded_unsharded_size if whole else flat._sharded_size
    return torch.zeros(size, dtype=dtype, device=handle.device)


def own_views(handle: FlatParamHandle, whole: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors that lie in a whole flat gradient, by their numbers."""
    return tuple(handle._get_unflat_views(whole))


def put(
    handle: FlatParamHandle,
    reduced: torch.Tensor | None,
    own: torch.Tensor | None,
    absent: Sequence[int],
) -> None:
    """Give a flat parameter its gradients: averaged and cut, this rank's own, or both.

    absent  the numbers of tensors that have none"""
    import torch

    flat = handle.flat_param
    gradient = own if own is not None else reduced
    assert gradient is not None
    if own is not None and reduced is not None:
        setattr(flat, SAVED, reduced)
    # torch refuses a gradient of another size or dtype than the shard, and sets its data itself.
    flat.grad = torch.empty_like(flat)
    flat.grad.data = gradient
    mask, params = flat._is_grad_none_mask, flat._params
    if mask is None or params is None:  # use_orig_params=False
        return
    for number in absent:
        mask[number] = True
    if own is None and handle.uses_sharded_strategy:
        handle._use_sharded_grad_views()
        return
    handle._use_unsharded_grad_views()
    for number in absent:
        params[number].grad = None
