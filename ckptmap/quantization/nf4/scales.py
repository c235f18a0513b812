"""Store the scales of NF4 tensors whose codes are kept: in 8 bits as torchao does, or without loss.

    scales [m] f32  ->  quantized_scalers i8 [m], quantization_factor T [m/unit], scaler_mean T []

torchao stores scales as 8-bit integers with one step per scaler block; `ScaleLevels` chooses the step so
that conversions to and fro do not drift. The exact form (scaler block 1, all in float32) has a step for
each scale, chosen so that `scaler / factor` is the scale to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckptmap.core.quantized_codes import CoarseScales
from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.quantization.blockwise import fourbit
from ckptmap.quantization.blockwise.eight_bit_scales import ScaleLevels
from ckptmap.quantization.dense import flat
from ckptmap.quantization.nf4 import kernels as nf4_codes
from ckptmap.quantization.nf4.parts import DATA, FACTOR, MEAN, SCALERS, TABLE
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 16
"""Scales per chunk."""


# ------------------------------------------------------------------------------- scales


def exact_scalers(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an exact quotient: scales [m] f32 -> scalers [m] i8, factor [m] f32, with `scaler / factor == scale` in float32.

    Raises RunError CKM309 where no such pair exists.
    """
    import torch

    magnitude = scales.abs()
    scalers = torch.zeros(scales.shape, dtype=torch.float32)
    factor = torch.ones_like(scales)
    left = magnitude > 0
    for k in range(127, 0, -1):
        if not bool(left.any()):
            break
        at = left.nonzero().squeeze(1)
        wanted = magnitude[at]
        steps = torch.full_like(
            wanted, k
        )  # torch rounds number / tensor differently from tensor / tensor
        first = steps / wanted
        bits = first.view(torch.int32)
        for ulp in (0, 1, -1):
            tried = (bits + ulp).view(torch.float32)
            good = ((steps / tried) == wanted) & tried.isfinite() & left[at]
            factor[at[good]] = tried[good]
            scalers[at[good]] = k
            left[at[good]] = False
    if bool(left.any()):
        raise RunError(
            "CKM309",
            f"no float32 division gives {int(left.sum())} of the block scales, the first is"
            f" {float(scales[left][0]):.6g}",
            "leave this tensor as it is with --no-encode",
        )
    return scalers.mul_(scales.sign()).to(torch.int8), factor


def scale_writes(
    scales: torch.Tensor, needed: torch.Tensor, unit: int, dtype: torch.dtype
) -> Iterator[Write]:
    """Yield the nearest scalers, their factors, the mean and the table.

    Raises CoarseScales CKM311 where a scale that is `needed` (not 0 there) would become zero or change
    its sign.
    """
    import torch

    levels = torch.arange(-128, 128, dtype=torch.float32)
    grid = ScaleLevels(levels, unit, dtype, divides=True)
    mean, factors = grid.fitted(scales)
    for start in range(0, scales.numel(), grid.step):
        part = scales[start : start + grid.step]
        factor = factors[start // unit :][: part.numel() // unit]
        coded = grid.coded(part, mean, factor)
        if not bool(coded.decoded.isfinite().all()):
            raise CoarseScales(f"block scales overflow {str(dtype).removeprefix('torch.')}")
        CoarseScales.check(needed[start : start + grid.step], coded.distinguishable(part))
        yield Write(SCALERS, flat(start, part.numel()), (coded.at - 128).to(torch.int8))
        yield Write(FACTOR, flat(start // unit, factor.numel()), factor)
    yield Write(MEAN, flat(0, 1), mean.view(1))
    yield Write(TABLE, flat(0, 16), nf4_codes.value_table(dtype))


def exact_writes(scales: torch.Tensor) -> Iterator[Write]:
    """Yield a scaler and a factor for each block, a mean of 0, and the float32 table."""
    for start in range(0, scales.numel(), CHUNK):
        scalers, factor = exact_scalers(scales[start : start + CHUNK])
        yield Write(SCALERS, flat(start, scalers.numel()), scalers)
        yield Write(FACTOR, flat(start, factor.numel()), factor)
    yield Write(MEAN, flat(0, 1), scales.new_zeros(1))
    yield Write(TABLE, flat(0, 16), fourbit.table("nf4"))


# ------------------------------------------------------------------------------- whole tensors


class NF4Recoder:
    """Stores given codes unchanged, and their scales to the nearest 8-bit level or exactly."""

    state_nbytes = 0

    def __init__(self, block: int, unit: int, dtype: str, exact: bool, fidelity: str) -> None:
        self.fidelity = fidelity
        self.step = block // 2
        self._unit, self._dtype, self._exact = unit, dtype, exact
        self._zeros = fourbit.ZeroBlocks("nf4", self.step)

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        if not self._exact:
            codes = self._zeros.feed(offset, codes, scales)
        return (Write(DATA, flat(offset, codes.numel()), codes),)

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        import torch

        if self._exact:
            return exact_writes(scales)
        needed = self._zeros.hidden(scales)
        return scale_writes(scales, needed, self._unit, getattr(torch, self._dtype))


class ExactEncoder:
    """Encodes values as bitsandbytes does, by float32 quotients, with exact scales."""

    splittable = False

    def __init__(self, block: int, info: TensorInfo, device: str) -> None:
        import torch

        self.step = block
        self.sign_flips = 0
        dtype: torch.dtype = getattr(torch, info.dtype)
        self._quantizer = fourbit.FourBitQuantizer("nf4", info.numel, block, dtype, device)
        self._absmax = torch.empty(info.numel // block, dtype=torch.float32, device=device)
        self.state_nbytes = 4 * self._absmax.numel() + self._quantizer.nbytes

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """Encode values [m] T, m and `offset` multiples of the block -> codes u8 [m/2]."""
        import torch

        numel = values.numel()
        packed = torch.empty(numel // 2, dtype=torch.uint8, device=values.device)
        absmax = self._absmax.narrow(0, offset // self.step, numel // self.step)
        self._quantizer.run(values, absmax, packed)
        return (Write(DATA, flat(offset // 2, numel // 2), packed),)

    def finish(self) -> Iterable[Write]:
        """Yield the other parts. Raises RunError CKM309 where an input was not finite."""
        absmax = self._absmax.cpu()
        fourbit.check_finite(absmax, self.step)
        return exact_writes(absmax)
