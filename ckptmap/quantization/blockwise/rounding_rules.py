"""The arithmetic by which each library computes 8-bit codes: scales from the absmax, codes from both.

    rows [r, w] T, absmax [r] T -> scale [r], codes [r, w] i8 or fp8

Each rule is bit-equal to its library's own quantizer on the CPU, for finite values, except that a block of
zeros stays zero where the library divides 0 by 0. It gives the same bits on every device: see
`exact_division`. Each rule names its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.quantization.blockwise.exponents import inverses

if TYPE_CHECKING:
    import torch

_EPS = 1.1920928955078125e-07
"""float32's machine epsilon: the smallest scale that torchao writes."""


class RoundingRule(Protocol):
    """One library's arithmetic. Both methods compute on the device of their arguments."""

    codes_dtype: ClassVar[str]
    takes: ClassVar[str]
    """The dtype that values are cast to first, "" for their own."""
    reach: ClassVar[float]
    """The largest absolute value that a code stands for, as a multiple of the stored scale."""

    def scales(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales: absmax [...] T -> (scale as stored, fp32 operand of `apply`), both [...]."""

    def apply(self, values: torch.Tensor, operand: torch.Tensor) -> None:
        """Change fp32 values in place, so that a cast to `codes_dtype` gives the codes."""


@dataclass(frozen=True)
class TorchaoInt8:
    """`Int8Tensor.from_hp`, symmetric: scale = absmax / 127.5 in T, not below float32's epsilon;
    code = round_half_even(x * (1 / scale)) in fp32 (torchao 0.18, quant_primitives.py
    `choose_qparams_affine`, `_quantize_affine_no_dtype_cast`). With `reduce_range` codes are -64 to 63."""

    codes_dtype: ClassVar[str] = "int8"
    takes: ClassVar[str] = ""
    reach: ClassVar[float] = 128.0
    scale_dtype: str = "float32"
    reduce_range: bool = False

    def scales(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scale = divide(absmax, 63.5 if self.reduce_range else 127.5).clamp_(min=_EPS)
        wide = scale.to(torch.float32)
        return scale.to(getattr(torch, self.scale_dtype)), wide.reciprocal()

    def apply(self, values: torch.Tensor, operand: torch.Tensor) -> None:
        bound = 64 if self.reduce_range else 128
        values.mul_(operand).round_().clamp_(-bound, bound - 1)


@dataclass(frozen=True)
class BitsandbytesInt8:
    """`int8_vectorwise_quant`: values in float16, SCB = absmax, code = round(x * (127 / SCB))
    (bitsandbytes 0.50, backends/default/ops.py)."""

    codes_dtype: ClassVar[str] = "int8"
    takes: ClassVar[str] = "float16"
    reach: ClassVar[float] = 1.0

    def scales(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scale = absmax.to(torch.float32)
        return scale, (127.0 / scale).masked_fill_(scale == 0, 0.0)

    def apply(self, values: torch.Tensor, operand: torch.Tensor) -> None:
        values.mul_(operand).round_()


@dataclass(frozen=True)
class TorchaoFloat8:
    """`Float8Tensor.from_hp`: scale = absmax / 448 in T, code = x / scale in fp32 (torchao 0.18,
    quant_primitives.py `_choose_scale_float8`, `_quantize_affine_float8`). A scale of 0, or one so
    small that T rounds it to 0, divides by nothing: its codes are those of x."""

    codes_dtype: ClassVar[str] = "float8_e4m3fn"
    takes: ClassVar[str] = ""
    reach: ClassVar[float] = 448.0
    scale_dtype: str = "float32"

    def scales(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scale = divide(absmax, self.reach)
        wide = scale.to(torch.float32)
        return scale.to(getattr(torch, self.scale_dtype)), wide.masked_fill(wide == 0, 1.0)

    def apply(self, values: torch.Tensor, operand: torch.Tensor) -> None:
        values.div_(operand).clamp_(-self.reach, self.reach)


@dataclass(frozen=True)
class TorchaoFloat8E5m2(TorchaoFloat8):
    """The same in e5m2: scale = absmax / 57344."""

    codes_dtype: ClassVar[str] = "float8_e5m2"
    reach: ClassVar[float] = 57344.0


@dataclass(frozen=True)
class FinegrainedFloat8:
    """transformers' `Fp8Quantize`: code = x * (448 / absmax) in fp32, `weight_scale_inv` =
    1 / (448 / absmax), and 1 for a block of zeros (transformers 5, finegrained_fp8.py). Where that
    quotient overflows, and zeros would become NaN, it is the largest finite number.

    A `scale_dtype` of 16 bits stores the rounded scale, and codes are of the scale as it is stored."""

    codes_dtype: ClassVar[str] = "float8_e4m3fn"
    takes: ClassVar[str] = "float32"
    reach: ClassVar[float] = 448.0
    scale_dtype: str = "float32"

    def scales(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        forward = 448.0 / absmax.masked_fill(absmax == 0, 448.0)
        forward.clamp_(max=torch.finfo(torch.float32).max)
        scale = 1.0 / forward
        if self.scale_dtype == "float32":
            return scale, forward
        stored = scale.to(getattr(torch, self.scale_dtype))
        return stored, 1.0 / stored.to(torch.float32)

    def apply(self, values: torch.Tensor, operand: torch.Tensor) -> None:
        values.mul_(operand).clamp_(-448.0, 448.0)


@dataclass(frozen=True)
class FinegrainedExponents:
    """The same with `scale_fmt` "ue8m0": the scale is the power of two that is not below, stored as its
    exponent in the dtype `stored`, and code = x / scale."""

    codes_dtype: ClassVar[str] = "float8_e4m3fn"
    takes: ClassVar[str] = "float32"
    reach: ClassVar[float] = 0.0
    """An exponent is no number to multiply; codes are limited."""
    stored: str

    def scales(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        inverse, _ = FinegrainedFloat8().scales(absmax)
        above = (inverse.view(torch.int32) + 0x7FFFFF) >> 23
        return above.to(torch.uint8).view(getattr(torch, self.stored)), inverses(above)

    def apply(self, values: torch.Tensor, operand: torch.Tensor) -> None:
        values.mul_(operand).clamp_(-448.0, 448.0)
