"""A linear layer over frozen int8 codes that keeps the codes for its backward, not a dense weight.

torchao 0.18 casts the codes to the activations' dtype, and autograd keeps the result of every layer until
its backward: a training step then holds the whole dense model beside the codes, on each rank. Here the
backward casts them again, one layer at a time. The arithmetic is torchao's, so the bits are the same:

    y = (x @ codes.to(T).t()) * scale        dx = (dy * scale) @ codes.to(T)
    y = x @ W.t(), in groups of a row        dx = dy @ W,  W = dequantize().to(T)

Source: torchao 0.18, workflows/int8/int8_tensor.py, weight-only.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def applies(args: Any, kwargs: Any) -> bool:
    """Return whether these are the arguments of a linear layer that trains something before it."""
    import torch

    if kwargs or len(args) not in (2, 3) or torch.compiler.is_compiling():
        return False
    x, weight = args[:2]
    return bool(
        torch.is_grad_enabled()
        and x.requires_grad
        and not weight.requires_grad
        and weight.act_quant_kwargs is None
        and weight.act_pre_scale is None
        and weight.zero_point is None
    )


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.t() + bias`, for x [..., in] and codes [out, in]."""
    y: torch.Tensor = _over_codes().apply(x, weight)
    if bias is not None:
        y = y + bias
    return y


def _dense(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return what multiplies activations: the values, or the codes where a row has one scale."""
    if _in_groups(weight):
        values: torch.Tensor = weight.dequantize().to(dtype)
        return values
    codes: torch.Tensor = weight.qdata.to(dtype)
    return codes


def _in_groups(weight: Any) -> bool:
    return bool(weight.block_size[-1] < weight.qdata.shape[-1])


@cache
def _over_codes() -> Any:
    import torch

    class OverCodes(torch.autograd.Function):
        """The product with a frozen weight, which the context refers to without a copy: FSDP2 frees its
        memory after the forward and fills the same memory before the backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
            ctx.weight = weight
            y = torch.mm(x.reshape(-1, x.shape[-1]), _dense(weight, x.dtype).t())
            if not _in_groups(weight):
                y = y * weight.scale.to(x.dtype).flatten()
            return y.reshape(*x.shape[:-1], weight.qdata.shape[0])

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            weight, (grad,) = ctx.weight, grads
            flat = grad.reshape(-1, grad.shape[-1])
            if not _in_groups(weight):
                flat = flat * weight.scale.to(grad.dtype).flatten()
            return torch.mm(flat, _dense(weight, grad.dtype)).reshape(*grad.shape[:-1], -1), None

    return OverCodes
