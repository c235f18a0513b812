"""torchao's Adam and AdamW, with moments in 8 bits, 4 bits or fp8, or plain.

state[p] = {step, exp_avg: OptimState8bit, exp_avg_sq: OptimState8bit}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ckptmap.live.model.live_tensor import like
from ckptmap.live.optimizer.family import (
    KINDS,
    STEP,
    OptimizerFamily,
    OptimizerParam,
    is_a,
    local_of,
    step_dtype,
)
from ckptmap.live.optimizer.optimizer_types import LiveOptimizer
from ckptmap.live.rounding.record import record_of
from ckptmap.storage.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    import torch


class TorchaoOptimizer(LiveOptimizer, Protocol):
    """torchao's _AdamBase."""

    block_size: float
    """Elements that share a scale; infinity: moments are not quantized."""
    bf16_stochastic_round: bool
    is_adamw: bool

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor: ...

    def _subclass_zeros(self, p: torch.Tensor, signed: bool, block_size: float) -> torch.Tensor: ...


class TorchaoAdam(OptimizerFamily):
    """torchao's Adam and AdamW: 8 bit, 4 bit, fp8, or plain with stochastic rounding."""

    name = "torchao"
    mixed = True
    moments = ("exp_avg", "exp_avg_sq")

    def claims(self, optimizer: object) -> bool:
        return is_a(optimizer, "torchao", "_AdamBase")

    def flags(self, optimizer: TorchaoOptimizer) -> dict[str, object]:
        block = optimizer.block_size
        return {
            "block_size": "none" if block == float("inf") else int(block),
            "bf16_stochastic_round": bool(optimizer.bf16_stochastic_round),
            "is_adamw": bool(optimizer.is_adamw),
        }

    def rounds(self, optimizer: TorchaoOptimizer) -> bool:
        return bool(optimizer.bf16_stochastic_round) and record_of(optimizer) is None

    def blank(self, part: OptimizerParam, source: Mapping[str, object]) -> dict[str, object]:
        import torch

        optimizer: TorchaoOptimizer = part.optimizer
        with torch.no_grad():
            state: dict[str, object] = {STEP: torch.zeros((), dtype=_stored_step(part, source))}
            state["exp_avg"] = optimizer._new_buffer(part.param, True)
            state["exp_avg_sq"] = optimizer._new_buffer(part.param, False)
            if part.group.get("amsgrad"):
                state["max_exp_avg_sq"] = optimizer._new_buffer(part.param, False)
        return state

    def coded(self, part: OptimizerParam, scheme: str, signed: bool) -> torch.Tensor | None:
        optimizer: TorchaoOptimizer = part.optimizer
        local, block = local_of(part.param), optimizer.block_size
        if block == float("inf") or not local.numel() or local.numel() % block:
            return None
        quantized = optimizer._subclass_zeros(local, signed, block)
        if KINDS.get(type(quantized).__name__) != scheme:
            return None
        return like(part.param, quantized).to(part.param.device)


def _stored_step(part: OptimizerParam, source: Mapping[str, object]) -> torch.dtype:
    """Return the dtype of the step that was saved: torchao counted in torch's default dtype of then,
    and a bfloat16 step ends at 256."""
    lazy = source.get(STEP)
    if isinstance(lazy, LazyTensor) and lazy.torch_dtype.is_floating_point:
        return lazy.torch_dtype
    return step_dtype(part.group)
