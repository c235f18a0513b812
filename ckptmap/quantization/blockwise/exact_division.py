"""Divide a tensor by a number with the same bits on every device.

CUDA computes `tensor / python_number` as a product with the reciprocal, and so does a number that lies in
a 0-dim CPU tensor (pytorch issues 186618 and 191495). 74 % of float32 quotients by 127.5 then differ by
one unit in the last place from the CPU's. A 0-dim tensor on the device is divided by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_divisors: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}


def divide(values: torch.Tensor, number: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return values [...] T divided by a number that T represents exactly, into `out` where given.

    The first call for a number, a dtype and a device waits for that device.
    """
    import torch

    return torch.div(values, _divisor(number, values), out=out)


def _divisor(number: float, values: torch.Tensor) -> torch.Tensor:
    """Return the number as a 0-dim tensor of the values' dtype on their device."""
    import torch

    key = number, values.dtype, values.device
    divisor = _divisors.get(key)
    if divisor is None:
        # A copy that the host waits for: a kernel that fills it would run on one stream only.
        divisor = torch.tensor(number, dtype=values.dtype).to(values.device)
        if type(divisor) is torch.Tensor:  # a fake one must not outlive its mode
            _divisors[key] = divisor
    return divisor
