"""Encode values to NVFP4: codes of 4 bits, a float8 scale for 16 of them, and one scale of the tensor.

The scale of the tensor follows from its largest magnitude, and every code from that scale: so the values are
seen twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.chunks import chunk_numel, constant
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.quantization.blockwise.quantizer import absmax_of
from ckptmap.quantization.dense import flat
from ckptmap.quantization.microscaling import e2m1

if TYPE_CHECKING:
    import torch

BLOCK = 16
LARGEST_SCALE = 448.0
"""The largest value of float8_e4m3fn."""


class Nvfp4Rule(Protocol):
    """One library's arithmetic."""

    def overall(self, absmax: torch.Tensor) -> torch.Tensor:
        """Return the stored scale of a tensor, f32, of its largest magnitude [] T."""

    def scales(self, absmax: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
        """Return the stored scales of blocks, e4m3, of their largest magnitudes [..] T."""

    def scaled(
        self, values: torch.Tensor, scales: torch.Tensor, overall: torch.Tensor
    ) -> torch.Tensor:
        """Return values [.., block] T in units of their scales [..], f32."""


@dataclass(frozen=True)
class CompressedTensorsRule:
    """`generate_gparam`, `calculate_qparams` and `quantize` of compressed-tensors 0.20: the scale of the
    tensor, 448 * 6 / absmax, multiplies those of the blocks, which are absmax / 6 in T."""

    def overall(self, absmax: torch.Tensor) -> torch.Tensor:
        import torch

        least = torch.finfo(absmax.dtype).tiny
        scale = LARGEST_SCALE * e2m1.LARGEST / absmax.clamp(min=least)
        return scale.nan_to_num(1.0, 1.0, 1.0).to(torch.float32)

    def scales(self, absmax: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
        import torch

        scales = overall * divide(absmax, e2m1.LARGEST).to(torch.float32)
        stored = scales.clamp(-LARGEST_SCALE, LARGEST_SCALE).to(torch.float8_e4m3fn)
        least = constant("1/8", absmax.device, lambda: torch.tensor(0.125, device="cpu"))
        wide = stored.to(torch.float32)
        return torch.where(wide == 0, least, wide).to(torch.float8_e4m3fn)

    def scaled(
        self, values: torch.Tensor, scales: torch.Tensor, overall: torch.Tensor
    ) -> torch.Tensor:
        import torch

        return values.to(torch.float32) / (scales.to(torch.float32) / overall).unsqueeze(-1)


@dataclass(frozen=True)
class TorchaoRule:
    """`nvfp4_quantize` of torchao 0.18 with `per_tensor_amax_to_scale`, in fp32: the scale of the tensor,
    absmax / (448 * 6), is multiplied. A tensor of zeros, which would divide by 0, has the scale 1."""

    def overall(self, absmax: torch.Tensor) -> torch.Tensor:
        import torch

        scale = divide(absmax.to(torch.float32), LARGEST_SCALE * e2m1.LARGEST)
        return torch.where(scale == 0, 1.0, scale)

    def scales(self, absmax: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
        import torch

        least = torch.finfo(torch.float8_e4m3fn).tiny
        scales = divide(absmax.to(torch.float32), e2m1.LARGEST) / overall
        return scales.clamp(least, LARGEST_SCALE).to(torch.float8_e4m3fn)

    def scaled(
        self, values: torch.Tensor, scales: torch.Tensor, overall: torch.Tensor
    ) -> torch.Tensor:
        import torch

        inverse = (1.0 / overall) / scales.to(torch.float32)
        return values.to(torch.float32) * inverse.unsqueeze(-1)


class Nvfp4Encoder:
    """Encodes block by block, after `look` has seen all values.

    global_part  the part that holds the scale of the tensor
    block        how many values have one scale
    """

    splittable = False
    state_nbytes = 0

    def __init__(
        self, rule: Nvfp4Rule, global_part: str, packed_dtype: str = "uint8", block: int = BLOCK
    ) -> None:
        self._rule, self._global, self._packed = rule, global_part, packed_dtype
        self.step = block
        self._absmax: torch.Tensor | None = None
        self._overall: torch.Tensor | None = None

    def look(self, values: torch.Tensor) -> None:
        """Take note of the largest magnitude; a NaN counts as the largest."""
        import torch

        if values.numel():
            largest = absmax_of(values.view(1, -1), (1,))
            both = largest if self._absmax is None else torch.stack([largest, self._absmax])
            self._absmax = absmax_of(both.view(1, -1), (1,))

    def _scale(self) -> torch.Tensor:
        """Return the scale of the tensor, f32 [].

        A CPU asks at once whether it is finite, as `finish` does; to ask a device would be to wait for it.
        """
        if self._overall is None:
            absmax = self._absmax
            assert absmax is not None, "the values were looked at before they are fed"
            if absmax.is_cpu:
                self._require_finite()
            self._overall = self._rule.overall(absmax[0])
        return self._overall

    def _require_finite(self) -> None:
        """Raise RunError CKM309 where a value was not finite. Waits once for the device."""
        if self._absmax is not None and not bool(self._absmax.isfinite()):
            raise RunError(
                "CKM309",
                "expected finite values, found NaN or infinity",
                "leave this tensor unquantized with --no-encode, or repair it",
            )

    def feed(self, offset: int, values: torch.Tensor) -> Iterator[Write]:
        """Encode values [m] T; m and `offset` are multiples of the block."""
        import torch

        overall, block = self._scale(), self.step
        most = max(1, chunk_numel(values.device, e2m1.CHUNK_NUMEL) // block) * block
        for start in range(0, values.numel(), most):
            part = values.narrow(0, start, min(most, values.numel() - start)).view(-1, block)
            scales = self._rule.scales(absmax_of(part, (1,)), overall)
            codes = e2m1.rounded(self._rule.scaled(part, scales, overall))
            packed = e2m1.pack(codes).view(-1).view(getattr(torch, self._packed))
            at = offset + start
            yield Write("packed", flat(at // 2, packed.numel()), packed)
            yield Write("scale", flat(at // block, scales.numel()), scales)

    def finish(self) -> Iterable[Write]:
        """Yield the scale of the tensor. Raises RunError CKM309 where a value was not finite."""
        self._require_finite()
        yield Write(self._global, flat(0, 1), self._scale().view(1))
