"""The state of one parameter in a checkpoint: its step count, and moments of one name from another.

{step: 1000, exp_avg: LazyTensor, exp_avg_sq: LazyTensor}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmap.live.optimizer.family import STEP
from ckptmap.storage.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    import torch

Source = Mapping[str, Any]
"""State of one parameter: canonical name -> LazyTensor or plain value."""


def step_of(source: Source) -> float | None:
    """Return the count of steps; None: the state has none."""
    step = source.get(STEP)
    if isinstance(step, LazyTensor):
        return float(step.read()) if math.prod(step.shape) == 1 else None
    return float(step) if isinstance(step, int | float) else None


def most_stepped(sources: Sequence[Source]) -> Source:
    """Return the state that was stepped most, of the tensors of a flat parameter: the flat parameter
    has one step count, and one of every other entry that is no moment."""
    stepped = [source for source in sources if source]
    if len(stepped) == 1:
        return stepped[0]
    return max(stepped, key=lambda source: step_of(source) or 0, default={})


def step_like(live: object, number: float) -> torch.Tensor | int:
    """Return a step count in the live optimizer's type, or in a wider one where that cannot hold it: in
    bfloat16 1001 would be 1000, and stay 1000."""
    import torch

    if isinstance(live, torch.Tensor):
        wide = (live.dtype, torch.float32, torch.float64)
        holds = (d for d in wide if torch.tensor(number, dtype=d).item() == number)
        with torch.no_grad():
            return live.to(next(holds, live.dtype)).fill_(number)
    return int(number)


def derivation(name: str, source: Source, betas: Sequence[float]) -> tuple[str, float | None]:
    """Return the entry that a moment is computed from, and the factor; (name, None) where the checkpoint
    has it.

    max_exp_avg_sq <- exp_avg_sq, its value if this were the first step with amsgrad.
    momentum_buffer <- exp_avg / (1 - beta1): both sum past gradients with weights beta1^k, and
    Adam's average has the factor 1 - beta1 (Kingma and Ba, 2015, algorithm 1).
    """
    if name in source:
        return name, None
    if name == "max_exp_avg_sq" and "exp_avg_sq" in source:
        return "exp_avg_sq", 1.0
    adam = "exp_avg" in source and "exp_avg_sq" in source  # Lion's average has another factor
    if name == "momentum_buffer" and adam and betas:
        return "exp_avg", 1.0 / (1.0 - float(betas[0]))
    return name, None
