"""The base of NVFP4 encodings: blocks of 16 with a float8 scale, and one scale of the whole tensor.

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
        import torch

        scale = parts["scale"].to(torch.float32).view(grid.sizes)
        overall = self.overall(parts, grid)
        factors = scale / overall if self.divides else scale * overall
        if factors.is_cpu and not bool(factors.isfinite().all()):
            raise SourceError(
                "CKM115",
                f"scale or {self.global_part}: expected finite scales, found NaN or infinity",
                "it was quantized from values that were not finite, or it is damaged: copy it again",
            )
        return factors

    def rule(self) -> Nvfp4Rule:
        """Return the rule by which values become scales and codes."""
        return CompressedTensorsRule()

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        return Nvfp4Encoder(self.rule(), self.global_part, self.packed_dtype)

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return a recoder for codes in the same blocks of 16, whatever their scales, else None."""
        mine = self.grid(info)
        if mine is None or self.extra or mine.name != grid.name:
            return None
        same = (mine.codes, mine.block, mine.axes) == (grid.codes, grid.block, grid.axes)
        return Nvfp4Recoder(self.global_part, self.divides, self.packed_dtype) if same else None
