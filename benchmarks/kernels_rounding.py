"""Measure stochastic rounding by position against torchao's, operation by operation and compiled.

    python benchmarks/kernels_rounding.py
    python benchmarks/kernels_rounding.py --only compiled --size 2048

The measurement is that of `kernels_4bit.py`: one CPU thread, 4096 x 4096 float32 values, which become
bfloat16. The bits differ from torchao's; the rule and the resolution of probabilities are the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kernels_4bit as kernels
from kernels_4bit import Contest, Kernel

CONTESTS = (
    Contest("round to bf16, eager", "ours", ("torchao",), "1x torchao"),
    Contest("round to bf16, compiled", "ours_compiled", ("torchao_compiled",), "4x torchao"),
)


def _position() -> tuple[Any, Any]:
    import torch

    from ckptmap.live.rounding.position_bits import key_of

    return torch.zeros(1, dtype=torch.int32), key_of(7, 1, "layers.0.weight").tensors()


def ours(w: Any) -> Kernel:
    from ckptmap.live.rounding.position_bits import round_at

    values, (rows, key) = w.float(), _position()
    return lambda: round_at(values, rows, w.numel(), key), 2 * w.numel()


def ours_compiled(w: Any) -> Kernel:
    import torch

    from ckptmap.live.rounding.position_bits import round_at

    values, (rows, key) = w.float(), _position()
    compiled = torch.compile(round_at, fullgraph=True, dynamic=False)
    compiled(values, rows, w.numel(), key)
    return lambda: compiled(values, rows, w.numel(), key), 2 * w.numel()


# ------------------------------------------------------------------------------- the library


def torchao(w: Any) -> Kernel:
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    values = w.float()
    return lambda: _fp32_to_bf16_sr(values), 2 * w.numel()


def torchao_compiled(w: Any) -> Kernel:
    import torch
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    values = w.float()
    compiled = torch.compile(_fp32_to_bf16_sr, fullgraph=True, dynamic=False)
    compiled(values)
    return lambda: compiled(values), 2 * w.numel()


# ------------------------------------------------------------------------------- check


def check(w: Any) -> None:
    """Raise AssertionError if either rounds to another number than a neighbour, is biased, or if our bits
    differ where they are compiled."""
    import torch

    exact = (w.float() * 1.001).contiguous()
    made = [make(exact)[0]() for make in (ours, ours_compiled, torchao)]
    assert torch.equal(made[0], made[1]), "compiled"
    for rounded in made:
        distance = (rounded.float() - exact) / exact.abs().clamp_min(1e-30)
        assert distance.abs().max() < 2**-7, "not a neighbour"
        assert abs(distance.mean()) < 5 * 2**-8 / w.numel() ** 0.5, "biased"


if __name__ == "__main__":
    kernels.main(sys.modules[__name__])
