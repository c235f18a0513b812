"""The rounding rule of MXFP8: codes of 8 bits floating point with a power of two as the scale of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.quantization.blockwise.exponents import ExponentRule, inverses

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Mxfp8Rule:
    """code = x / 2 ** e, limited to the largest code; the stored scale is e + 127, u8.

    rounding  how e follows from the largest magnitude: see `ExponentRule`
    """

    codes_dtype: ClassVar[str] = "float8_e4m3fn"
    takes: ClassVar[str] = ""
    reach: ClassVar[float] = 0.0
    """No multiple of an exponent tells whether a value overflows; none does, because codes are limited."""
    largest: ClassVar[float] = 448.0

    rounding: str
    stored: str = "uint8"
    """The dtype of the stored scale."""

    def scales(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        exponents = ExponentRule(self.largest, self.rounding).exponents(absmax)
        stored = exponents.to(torch.uint8).view(getattr(torch, self.stored))
        return stored, inverses(exponents)

    def apply(self, values: torch.Tensor, operand: torch.Tensor) -> None:
        values.mul_(operand).clamp_(-self.largest, self.largest)


@dataclass(frozen=True)
class Mxfp8E5m2Rule(Mxfp8Rule):
    """The same with codes in e5m2, of which the largest is 57344."""

    codes_dtype: ClassVar[str] = "float8_e5m2"
    largest: ClassVar[float] = 57344.0
