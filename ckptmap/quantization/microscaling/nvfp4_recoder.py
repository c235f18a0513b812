"""Store given codes unchanged as NVFP4: find the float8 scales and the scale of the tensor that decode to
given scales.

    scales f32 [n]  ->  scale e4m3 [n], overall f32    with scale / overall, or scale * overall, near each

There are at most 253 different float8 numbers, so the work is done once for each different scale. The largest
is the quotient (or product) of one of 126 float8 numbers and the scale of the tensor: each is tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.quantization.dense import flat

if TYPE_CHECKING:
    import torch

_ULPS = (0, 1, -1, 2, -2)
"""Units in the last place to try around a number that was computed with rounding."""
_DIFFERENT = 253
TOLERANCE = 2.0**-22
"""Largest relative difference of a scale that is taken for the same number, rounded otherwise."""


def fitted(scales: torch.Tensor, divides: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (stored e4m3 [n], overall f32 []) that decode to the scales f32 [n].

    Most of them decode to the same bits where one library stored them so. Raise RunError CKM309 where they
    are no float8 multiples of one number.
    """
    import torch

    values, back = torch.unique(scales, return_inverse=True)
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    if values.numel() > _DIFFERENT or not bool(largest.isfinite()):
        raise _refused(values.numel())
    if not bool(largest > 0):
        one = torch.ones((), dtype=torch.float32)
        return torch.zeros(scales.shape, dtype=torch.float8_e4m3fn), one
    overall = _candidates(largest, divides).unsqueeze(1)
    stored = _stored(values, overall, divides)
    decoded = _decoded(stored, overall, divides)
    error = ((decoded - values).abs() / values.abs().clamp(min=1e-38)).amax(1)
    exact = (decoded == values).sum(1)
    best = int(torch.where(error <= TOLERANCE, exact, -1).argmax())
    if float(error[best]) > TOLERANCE:
        raise _refused(values.numel())
    return stored[best].to(torch.float8_e4m3fn)[back].view(scales.shape), overall[best, 0]


def _candidates(largest: torch.Tensor, divides: bool) -> torch.Tensor:
    """Return the scales of the tensor with which a float8 number decodes to the largest scale."""
    import torch

    codes = torch.arange(126, 0, -1, dtype=torch.uint8)  # from 448 down
    numbers = codes.view(torch.float8_e4m3fn).to(torch.float32)
    exact = numbers / largest if divides else largest / numbers
    bits = exact.view(torch.int32).unsqueeze(1) + torch.tensor(_ULPS, dtype=torch.int32)
    near = bits.flatten().view(torch.float32)
    return near[near.isfinite() & (near > 0)]


def _stored(values: torch.Tensor, overall: torch.Tensor, divides: bool) -> torch.Tensor:
    import torch

    near = values * overall if divides else values / overall
    return near.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32)


def _decoded(stored: torch.Tensor, overall: torch.Tensor, divides: bool) -> torch.Tensor:
    return stored / overall if divides else stored * overall


def _refused(count: int) -> RunError:
    return RunError(
        "CKM309",
        f"its {count} different scales are not float8 multiples of one number",
        "decode it first (--to hf-bf16), then quantize",
    )


class Nvfp4Recoder:
    """Writes codes as they are, and fits the scales when all are there.

    global_part  the part that holds the scale of the tensor
    """

    step = 1
    state_nbytes = 0
    fidelity = "codes"

    def __init__(self, global_part: str, divides: bool, packed_dtype: str) -> None:
        self._global, self._divides, self._packed = global_part, divides, packed_dtype

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        import torch

        values = codes.view(getattr(torch, self._packed))
        return (Write("packed", flat(offset, codes.numel()), values),)

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        """Yield the scales. Raise RunError CKM309 where they do not fit."""
        stored, overall = fitted(scales.reshape(-1), self._divides)
        yield Write("scale", flat(0, stored.numel()), stored)
        yield Write(self._global, flat(0, 1), overall.view(1))
