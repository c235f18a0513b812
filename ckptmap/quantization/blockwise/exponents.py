"""Scales that are powers of two, stored as their biased exponent (E8M0).

    byte b  ->  2 ** (b - 127), and 255 is NaN

Source: OCP Microscaling Formats specification 1.0, section 5.4.1. Formats store the byte as uint8 or as
float8_e8m0fnu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.errors import SourceError
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.quantization.blockwise.group_checks import NOT_FINITE

if TYPE_CHECKING:
    import torch

DTYPES = ("uint8", "float8_e8m0fnu")
NAN = 255


def powers(exponents: torch.Tensor, name: str) -> torch.Tensor:
    """Return the scales in fp32. Raise SourceError CKM115 where an exponent is NaN.

    name  of the part, for the message. A device is not asked, which would be to wait for it: encodings
          take their exponents on the CPU
    """
    import torch

    raw = exponents.view(torch.uint8)
    if raw.is_cpu and raw.numel() and int(raw.amax()) == NAN:
        count = int((raw == NAN).sum())
        raise SourceError(
            "CKM115",
            f"{name}: expected exponents 0 to 254, found 255, which is NaN, in {count} of"
            f" {raw.numel()} blocks",
            NOT_FINITE,
        )
    return raw.view(torch.float8_e8m0fnu).to(torch.float32)


def exponents_of(scales: torch.Tensor) -> torch.Tensor:
    """Return the bytes u8 of scales f32, which are powers of two from 2^-127 to 2^127."""
    import torch

    return (scales.view(torch.int32) >> 23).to(torch.uint8)


@dataclass(frozen=True)
class ExponentRule:
    """How a library computes the exponent of a block from its largest magnitude.

    largest   the largest value of a code: 6 of E2M1, 448 of E4M3, 57344 of E5M2
    rounding  "up": the smallest power of two with which no value overflows (triton_kernels'
              `downcast_to_mxfp_torch`; torchao's RCEIL)
              "down": of the OCP specification, section 6.3 (torchao's FLOOR)
              "even": as "down", of a magnitude that is rounded to the mantissa of a code first
              (compressed-tensors' `generate_mx_scales`; torchao's EVEN)
    """

    largest: float
    rounding: str

    def exponents(self, absmax: torch.Tensor) -> torch.Tensor:
        """Return the biased exponents, int32: absmax [...] T, finite. A block of zeros has 0."""
        import torch

        wide = absmax.to(torch.float32)
        if self.rounding == "up":
            bits = divide(wide, self.largest).view(torch.int32)
            return (bits + 0x7FFFFF) >> 23
        bits = wide.view(torch.int32)
        if self.rounding == "even":
            bits = bits + (1 << 21)
        return ((bits >> 23) - _power_below(self.largest)).clamp_(min=0)


def _power_below(largest: float) -> int:
    """Return the exponent of the largest power of two that is not above."""
    import math

    return math.frexp(largest)[1] - 1


def inverses(exponents: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale in fp32, exact: exponents int32, 0 to 254."""
    import torch

    # The inverse of 2^127 is subnormal, and that of 2^-127 is 2^127.
    normal = ((254 - exponents).clamp(min=1) << 23).view(torch.float32)
    return torch.where(exponents == 254, 2.0**-127, normal)
