"""The base of NVFP4 encodings: blocks of 16, or 32, with a float8 scale, and one scale of the whole tensor.

    w [.., rows, width] T  ->  packed u8 [.., rows, width / 2], scale e4m3 [.., rows, width / 16], global f32

    w'[i, j] = T(code[i, j] * s[i, j // 16])        s = scale / global, or scale * global, in fp32

Whether the scale of the tensor divides or multiplies differs by library; so does its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoder
from ckptmap.quantization.blockwise.chunks import sent_behind
from ckptmap.quantization.blockwise.group_checks import NOT_FINITE
from ckptmap.quantization.microscaling.nvfp4_encoder import (
    BLOCK,
    CompressedTensorsRule,
    Nvfp4Encoder,
    Nvfp4Rule,
)
from ckptmap.quantization.microscaling.nvfp4_recoder import Nvfp4Recoder
from ckptmap.quantization.microscaling.packed_fp4 import PackedFp4
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Nvfp4(PackedFp4):
    """Packed 4-bit codes with two levels of scales.

    global_shape  the stored shape of the scale of the tensor
    """

    block: ClassVar[int] = BLOCK
    global_part: ClassVar[str]
    divides: ClassVar[bool]
    """Whether values are divided by the scale of the tensor, or multiplied."""
    values_name: ClassVar[str] = "e2m1 * scale in fp32"

    scale_dtype: str = "float8_e4m3fn"
    global_shape: tuple[int, ...] = (1,)

    @property
    def host_parts(self) -> Collection[str]:
        return ("scale", self.global_part)

    def more_parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        return {self.global_part: TensorInfo(self.global_shape, "float32")}

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {"global_shape": list(self.global_shape)}

    def exact_in(self, dtype: torch.dtype) -> bool:
        import torch

        return dtype == torch.float32

    def overall(self, parts: Mapping[str, torch.Tensor], grid: Box) -> torch.Tensor:
        """Return the scale of the tensor, f32, so that it broadcasts against a box of the grid."""
        return parts[self.global_part].reshape(())

    def decoded_scales(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], grid: Box
    ) -> torch.Tensor:
        if parts["scale"].is_cpu:
            self._require_finite(parts, grid)
        return self._factors(parts["scale"].view(grid.sizes), self.overall(parts, grid))

    def sent_scales(
        self,
        info: TensorInfo,
        parts: Mapping[str, torch.Tensor],
        grid: Box,
        device: torch.device,
    ) -> torch.Tensor:
        """Send the stored scales, and compute there: a stored one has one byte, a factor four."""
        if device.type == "cpu" or not parts["scale"].is_cpu:
            return self.decoded_scales(info, parts, grid)
        try:
            self._require_finite(parts, grid)
        except SourceError:  # padding between the scales may hold anything: look at them alone
            return super().sent_scales(info, parts, grid, device)
        there = {
            name: sent_behind(parts[name], device) for name in self.host_parts if name in parts
        }
        return self.decoded_scales(info, there, grid)

    def _factors(self, scale: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
        import torch

        wide = scale.to(torch.float32)
        return wide / overall if self.divides else wide * overall

    def _require_finite(self, parts: Mapping[str, torch.Tensor], grid: Box) -> None:
        """Raise SourceError CKM115 where a factor is not finite.

        The factors of the least and of the largest scale tell it for all between. The largest number of the
        bits of a float8 is NaN.
        """
        import torch

        scale = parts["scale"]
        if scale.dtype == torch.float8_e4m3fn and scale.numel():
            magnitude = scale.view(torch.uint8).bitwise_and(0x7F)
            ends = (most((-2, -1), keepdim=True) for most in (magnitude.amin, magnitude.amax))
            scale = torch.stack(list(ends)).view(scale.dtype)
        if not bool(self._factors(scale, self.overall(parts, grid)).isfinite().all()):
            raise SourceError(
                "CKM115",
                f"scale or {self.global_part}: expected finite scales, found NaN or infinity",
                NOT_FINITE,
            )

    def rule(self) -> Nvfp4Rule:
        """Return the rule by which values become scales and codes."""
        return CompressedTensorsRule()

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        return Nvfp4Encoder(self.rule(), self.global_part, self.packed_dtype, self.block)

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return a recoder for codes in the same blocks of 16, whatever their scales, else None."""
        mine = self.grid(info)
        if mine is None or self.extra or mine.name != grid.name:
            return None
        same = (mine.codes, mine.block, mine.axes) == (grid.codes, grid.block, grid.axes)
        return Nvfp4Recoder(self.global_part, self.divides, self.packed_dtype) if same else None
