"""Divide a tensor by a number with the same bits on every device.

CUDA computes `tensor / python_number` as a product with the reciprocal, and so does a number that lies in
a 0-dim CPU tensor (pytorch issues 186618 and 191495). 74 % of float32 quotients by 127.5 then differ by
one unit in the last place from the CPU's. A 0-dim tensor on the device is divided by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.chunks import constant

if TYPE_CHECKING:
    import torch


def divide(values: torch.Tensor, number: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return values [...] T divided by a number that T represents exactly, into `out` where given.

    The first call for a number, a dtype and a device waits for that device.
    """
    import torch

    dtype = values.dtype
    divisor = constant(
        ("divisor", number, dtype),
        values.device,
        lambda: torch.tensor(number, dtype=dtype, device="cpu"),
    )
    return torch.div(values, divisor, out=out)
