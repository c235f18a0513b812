"""torchao's MXTensor and NVFP4Tensor, pickled and flattened; written flattened.

    fc.weight [out, in] T  ->  fc._weight_qdata u8 [out, in / 2], or float8 [out, in]
                               fc._weight_scale e8m0 [out, in / 32], or e4m3 [out, in / 16]
                               fc._weight_per_tensor_scale f32 [], of some NVFP4Tensor

    w'[i, j] = T(code * 2 ** e)      T(code * (per_tensor_scale * scale)), in fp32

Bit-equal to `dequantize` of torchao 0.18 (prototype/mx_formats). Scales may be swizzled, see `swizzle`. What is
written has the codes of torchao's RCEIL, which its configs choose, and scales in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.json_text import parse_json
from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.formats.safetensors.torchao_metadata import SCHEME, part_key
from ckptmap.protocols import Refusal
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.exponents import exponents_of
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule
from ckptmap.quantization.blockwise.scaled_encoding import POWERS, ScaledEncoding
from ckptmap.quantization.microscaling import swizzle
from ckptmap.quantization.microscaling.mxfp8 import Mxfp8E5m2Rule, Mxfp8Rule
from ckptmap.quantization.microscaling.nvfp4 import Nvfp4
from ckptmap.quantization.microscaling.nvfp4_encoder import Nvfp4Rule, TorchaoRule
from ckptmap.quantization.microscaling.packed_fp4 import PackedFp4
from ckptmap.quantization.torchao.microscaled_parts import (
    FP4,
)
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

EXPONENTS = "float8_e8m0fnu"
ACTIVATIONS = ("act_per_tensor_scale",)
NAMES = {"": "qdata", "packed": "qdata"}


def _dtype(name: str) -> dict[str, object]:
    return {"_type": "torch.dtype", "_data": name}


@dataclass(frozen=True)
class _Described:
    """What torchao's metadata says of a tensor.

    data  the attributes of its class, as JSON; "" for one that is written anew
    """

    kind: ClassVar[str] = "MXTensor"
    elements: ClassVar[str]

    def part_key(self, key: str, part: str) -> str:
        return part_key(key, NAMES.get(part, part))


def _described(encoding: Microscaled, info: TensorInfo) -> Mapping[str, object]:
    parts = encoding.parts(info)
    assert not isinstance(parts, Refusal), "it was asked before"
    names = [NAMES.get(part, part) for part in parts]
    data = parse_json(encoding.data) if encoding.data else fresh_data(encoding, info)
    return {"native": SCHEME, "kind": encoding.kind, "data": data, "names": names}


def fresh_data(encoding: Microscaled, info: TensorInfo) -> Mapping[str, object]:
    """Return the attributes that torchao's configs give. Its MX layers run with quantized activations only."""
    common: dict[str, object] = {
        "block_size": encoding.block_of(info)[-1],
        "is_swizzled_scales": False,
    }
    dtype = {"orig_dtype": _dtype(info.dtype)}
    if encoding.kind == "NVFP4Tensor":
        return common | dtype | {"use_triton_kernel": False, "act_quant_kwargs": None}
    common |= {
        "elem_dtype": _dtype(encoding.elements),
        "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
    }
    rounding = {"scaling_mode": {"_type": "ScaleCalculationMode", "_data": "RCEIL"}}
    kwargs = {"_type": "QuantizeTensorToMXKwargs", "_data": common | rounding}
    return common | dtype | {"act_quant_kwargs": kwargs}


@dataclass(frozen=True)
class AoMxfp4(_Described, PackedFp4):
    """`swizzled` tells the order of the scales."""

    name: ClassVar[str] = "torchao-mxfp4"
    scheme: ClassVar[str] = "torchao-mxfp4"
    native: ClassVar[str] = SCHEME
    elements: ClassVar[str] = FP4

    scale_dtype: str = EXPONENTS
    swizzled: bool = False
    data: str = ""

    def scale_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        return swizzle.stored_shape(grid) if self.swizzled else grid

    def scale_box(self, info: TensorInfo, grid: Box) -> Box:
        return _scale_box(self, info, grid)

    def decoded_scales(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], grid: Box
    ) -> torch.Tensor:
        return super().decoded_scales(info, _ordered(self, parts, grid), grid)

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return _described(self, info)


@dataclass(frozen=True)
class AoNvfp4(_Described, Nvfp4):
    """`has_overall` tells whether there is a scale of the tensor."""

    name: ClassVar[str] = "torchao-nvfp4"
    scheme: ClassVar[str] = "torchao-nvfp4"
    native: ClassVar[str] = SCHEME
    kind: ClassVar[str] = "NVFP4Tensor"
    elements: ClassVar[str] = FP4
    global_part: ClassVar[str] = "per_tensor_scale"
    divides: ClassVar[bool] = False
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS

    global_shape: tuple[int, ...] = ()
    has_overall: bool = True
    swizzled: bool = False
    data: str = ""

    def more_parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        return super().more_parts(info) if self.has_overall else {}

    def scale_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        return swizzle.stored_shape(grid) if self.swizzled else grid

    def scale_box(self, info: TensorInfo, grid: Box) -> Box:
        return _scale_box(self, info, grid)

    def overall(self, parts: Mapping[str, torch.Tensor], grid: Box) -> torch.Tensor:
        import torch

        if not self.has_overall:
            return torch.ones((), dtype=torch.float32, device=parts["scale"].device)
        overall = parts[self.global_part]
        if overall.numel() == 1:
            return overall.reshape(())
        return overall.narrow(0, grid.offsets[0], grid.sizes[0])  # one an expert: [e, 1, 1]

    def decoded_scales(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], grid: Box
    ) -> torch.Tensor:
        return super().decoded_scales(info, _ordered(self, parts, grid), grid)

    def rule(self) -> Nvfp4Rule:
        return TorchaoRule()

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        plain = self.has_overall and not self.swizzled and self.global_shape == ()
        return super().recoder(info, grid, device) if plain else None

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return _described(self, info)


@dataclass(frozen=True)
class AoMxfp8(_Described, ScaledEncoding):
    """Float8 codes; `swizzled` tells the order of the scales."""

    name: ClassVar[str] = "torchao-mxfp8"
    scheme: ClassVar[str] = "torchao-mxfp8"
    codes_part: ClassVar[str] = "qdata"
    scale_part: ClassVar[str] = "scale"
    codes_dtype: ClassVar[str] = "float8_e4m3fn"
    elements: ClassVar[str] = "float8_e4m3fn"
    values_name: ClassVar[str] = POWERS

    scale_dtype: str = EXPONENTS
    swizzled: bool = False
    data: str = ""

    def rule(self, info: TensorInfo) -> RoundingRule:
        return Mxfp8Rule("up", EXPONENTS)

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        grid = block_geometry.grid_shape(info.shape, self.block_of(info))
        return swizzle.stored_shape(grid) if self.swizzled else grid

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if part == self.scale_part and self.swizzled:
            return _scale_box(self, info, block_geometry.grid_box(box, self.block_of(info)))
        return super().part_box(info, part, box)

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        grid = block_geometry.grid_box(box, self.block_of(info))
        super().decode(info, _ordered(self, parts, grid), box, out)

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        grid = Box.whole(block_geometry.grid_shape(info.shape, self.block_of(info)))
        return super().scales(info, _ordered(self, parts, grid))

    def unscaled(self, scales: torch.Tensor) -> torch.Tensor:
        import torch

        return exponents_of(scales).view(torch.float8_e8m0fnu)

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return the recoder where the scales of the grid are powers of two, else None."""
        alike = grid.values == self.values_name and not self.swizzled
        return super().recoder(info, grid, device) if alike else None

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return _described(self, info)


@dataclass(frozen=True)
class AoMxE5m2(AoMxfp8):
    name: ClassVar[str] = "torchao-mxfp8-e5m2"
    scheme: ClassVar[str] = "torchao-mxfp8-e5m2"
    codes_dtype: ClassVar[str] = "float8_e5m2"
    elements: ClassVar[str] = "float8_e5m2"

    def rule(self, info: TensorInfo) -> RoundingRule:
        return Mxfp8E5m2Rule("up", EXPONENTS)


Microscaled = AoMxfp4 | AoNvfp4 | AoMxfp8


def _scale_box(encoding: Microscaled, info: TensorInfo, grid: Box) -> Box:
    if not encoding.swizzled:
        return grid
    parts = encoding.parts(info)
    assert not isinstance(parts, Refusal), "it was read"
    return swizzle.stored_box(grid, parts["scale"].shape)


def _ordered(
    encoding: Microscaled, parts: Mapping[str, torch.Tensor], grid: Box
) -> Mapping[str, torch.Tensor]:
    """Return the parts with the scales of a box of the grid in their order."""
    if not encoding.swizzled or not grid.numel:
        return parts
    return {**parts, "scale": swizzle.in_order(parts["scale"], grid)}
