"""ModelOpt's exported weights, decoded: NVFP4, float8, int8 and packed int4.

    NVFP4  fc.weight u8 [out, in / 2], fc.weight_scale e4m3 [out, in / 16], fc.weight_scale_2 f32 []; of `W4A8_NVFP4_FP8`
           and `NVFP4_MLP_WEIGHT_ONLY` [out, in / 32]
    FP8    fc.weight e4m3 [out, in], fc.weight_scale f32 [], of rows [out], or of tiles [out / 128, 1, in / 128, 1]
    INT8   fc.weight i8 [out, in],   fc.weight_scale f32 [out]
    INT4   fc.weight u8 [out / 2, in], fc.weight_scale f32 [out, in / 128]: an even row in the low half of a byte

    w'[i, j] = T(code * (weight_scale * weight_scale_2))        T(code * weight_scale), in fp32

Source: `NVFP4QTensor`, `FP8QTensor` and `INT8QTensor` (modelopt 0.47, torch/quantization/qtensor) and
`pack_int4_in_uint8` (torch/export/quant_utils.py). The product is taken in fp32 and rounded to T once: modelopt's own
`dequantize` rounds the scale to the dtype that it is asked for first, vLLM and TensorRT-LLM do not.

A smoothed layer (AWQ, SmoothQuant) multiplies its inputs by `pre_quant_scale` [in]. The weight of a layer without it
is w'[i, j] * pre_quant_scale[j], taken in fp32 before the rounding to T. `weight_scale_2` of int4 (`W4A8_AWQ`) is for the
kernel, which holds values in float8 on its way: it does not change them here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoder, Refusal
from ckptmap.protocols.encodings import beside
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.chunks import chunk_numel
from ckptmap.quantization.blockwise.dequantize import window
from ckptmap.quantization.blockwise.group_checks import NOT_FINITE
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule, TorchaoFloat8
from ckptmap.quantization.blockwise.scaled_encoder import ScaledEncoder
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.extra_parts import Extra
from ckptmap.quantization.microscaling.nvfp4 import Nvfp4
from ckptmap.quantization.microscaling.nvfp4_encoder import Nvfp4Rule, TorchaoRule
from ckptmap.quantization.modelopt.integers import Int4Rule, Int8Rule, PairsEncoder, unpaired
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

METHOD = "modelopt"
ACTIVATIONS = ("input_scale",)
SMOOTHING = "pre_quant_scale"
OF_LAYER = (*ACTIVATIONS, SMOOTHING)
"""The parts whose names do not begin with that of the weight."""
CHUNK_NUMEL = 256 * 1024
"""Elements of a smoothed weight at a time, in fp32."""
SMOOTHED = Refusal(
    "its inputs are scaled by pre_quant_scale, which calibration has chosen (AWQ, SmoothQuant)"
)
Decode: TypeAlias = Callable[[TensorInfo, Mapping[str, "torch.Tensor"], Box, "torch.Tensor"], None]


class _Named:
    def part_key(self, key: str, part: str) -> str:
        if part in OF_LAYER:
            return beside(key, part)
        return f"{key}_{part}" if part not in ("", "packed") else key


def is_smoothed(extra: Extra) -> bool:
    return any(name == SMOOTHING for name, _, _ in extra)


@dataclass(frozen=True)
class ModeloptFp4(_Named, Nvfp4):
    name: ClassVar[str] = "modelopt-nvfp4"
    scheme: ClassVar[str] = "modelopt-nvfp4"
    native: ClassVar[str] = METHOD
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    global_part: ClassVar[str] = "scale_2"
    divides: ClassVar[bool] = False

    def algo(self, info: TensorInfo) -> str:
        return "NVFP4_AWQ" if is_smoothed(self.extra) else "NVFP4"

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        _decode(self, super().decode, info, parts, box, out)

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        return None if is_smoothed(self.extra) else super().grid(info)

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        return SMOOTHED if is_smoothed(self.extra) else None

    def rule(self) -> Nvfp4Rule:
        """Return torchao's rule, of which the scale of the tensor multiplies, too."""
        return TorchaoRule()


@dataclass(frozen=True)
class ModeloptFp4Of32(ModeloptFp4):
    """32 values have one scale."""

    block: ClassVar[int] = 32


def fp4_of(block: int, extra: Extra, global_shape: tuple[int, ...]) -> ModeloptFp4:
    made = ModeloptFp4Of32 if block == ModeloptFp4Of32.block else ModeloptFp4
    return made(extra=extra, global_shape=global_shape)


@dataclass(frozen=True)
class _Scaled(_Named, ScaledEncoding):
    """`scale_stored` is the stored shape of a single scale."""

    codes_part: ClassVar[str] = ""
    scale_part: ClassVar[str] = "scale"
    activations: ClassVar[Collection[str]] = ACTIVATIONS

    scale_stored: tuple[int, ...] = ()

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """Return [] or [1] of a single scale, [out] of rows, [rows, 1, columns, 1] of tiles."""
        rows, *more = grid = super().scale_shape(info)
        if self.block_of(info) == info.shape:
            return self.scale_stored
        return (rows,) if all(n == 1 for n in more) else tuple(n for at in grid for n in (at, 1))

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        shape = self.scale_shape(info)
        if part != self.scale_part or len(shape) <= len(info.shape):
            return super().part_box(info, part, box)
        grid = block_geometry.grid_box(box, self.block_of(info))
        ones = tuple(1 if box.numel else 0 for _ in grid.sizes)
        offsets = tuple(n for at in grid.offsets for n in (at, 0))
        return Box(offsets, tuple(n for pair in zip(grid.sizes, ones, strict=True) for n in pair))

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode a box. Raises SourceError CKM115 where a scale is not finite; a device is not waited for."""
        scale = parts["scale"]
        if scale.is_cpu and not bool(scale.isfinite().all()):
            bad = float(scale[scale.isfinite().logical_not()].reshape(-1)[0])
            raise SourceError("CKM115", f"scale: expected a finite scale, found {bad}", NOT_FINITE)
        _decode(self, super().decode, info, parts, box, out)

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        return None if is_smoothed(self.extra) else super().grid(info)

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        return SMOOTHED if is_smoothed(self.extra) else super().cannot_encode(info)

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {
            "native": METHOD,
            "extra": self.extra_record,
            "scale_stored": list(self.scale_stored),
        }


@dataclass(frozen=True)
class ModeloptE4m3(_Scaled):
    name: ClassVar[str] = "modelopt-fp8"
    scheme: ClassVar[str] = "modelopt-fp8"
    codes_dtype: ClassVar[str] = "float8_e4m3fn"

    def algo(self, info: TensorInfo) -> str:
        if self.block_of(info) == info.shape:
            return "FP8"
        return "FP8_PER_CHANNEL_PER_TOKEN" if self.block_of(info)[0] == 1 else "FP8_PB_WO"

    def rule(self, info: TensorInfo) -> RoundingRule:
        """Return the rule of which the scale is absmax / 448, as ModelOpt's."""
        return TorchaoFloat8(self.scale_dtype)


@dataclass(frozen=True)
class ModeloptI8(_Scaled):
    name: ClassVar[str] = "modelopt-int8"
    scheme: ClassVar[str] = "modelopt-int8"

    def algo(self, info: TensorInfo) -> str:
        return "W8A8_SQ_PER_CHANNEL" if self.extra else "W8A16"

    def rule(self, info: TensorInfo) -> RoundingRule:
        return Int8Rule()


@dataclass(frozen=True)
class ModeloptI4(_Scaled):
    """Two rows of codes in each row of bytes."""

    name: ClassVar[str] = "modelopt-int4"
    scheme: ClassVar[str] = "modelopt-int4"
    codes_part: ClassVar[str] = "packed"

    def algo(self, info: TensorInfo) -> str:
        return "W4A8_AWQ" if any(name == "scale_2" for name, _, _ in self.extra) else "W4A16_AWQ"

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return block_geometry.grid_shape(info.shape, self.block_of(info))

    def refusal(self, info: TensorInfo) -> Refusal | None:
        if len(info.shape) != 2 or info.shape[0] % 2:
            return Refusal(f"packs pairs of rows of matrices, found shape {list(info.shape)}")
        return super().refusal(info)

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        parts = super().parts(info)
        if isinstance(parts, Refusal):
            return parts
        rows, width = info.shape
        return {**parts, "packed": TensorInfo((rows // 2, width), "uint8")}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if part != "packed" or not box.numel:
            return super().part_box(info, part, box)
        (row, column), (rows, columns) = box.offsets, box.sizes
        low, high = row // 2, -(-(row + rows) // 2)
        return Box((low, column), (high - low, columns))

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return self.part_box(info, part, box) if part == "packed" else None

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        if box.numel:
            out.copy_(unpaired(parts["packed"], box.offsets[0], box.sizes[0]))

    def unpacked(self, parts: Mapping[str, torch.Tensor], box: Box) -> Mapping[str, torch.Tensor]:
        """Return the parts with the codes i8 of a box in place of its bytes."""
        return {**parts, "packed": unpaired(parts["packed"], box.offsets[0], box.sizes[0])}

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        if is_smoothed(self.extra):
            return None
        codes = TensorInfo(info.shape, "int8")
        return CodeGrid("int4", codes, self.block_of(info), self.values_name)

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        return None

    def rule(self, info: TensorInfo) -> RoundingRule:
        return Int4Rule()

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        inner = ScaledEncoder(info, self.block_of(info), self.rule(info), "packed", "scale", {})
        return PairsEncoder(inner, info.shape[1])


Encodings: TypeAlias = ModeloptFp4 | ModeloptE4m3 | ModeloptI8 | ModeloptI4


def _decode(
    encoding: Encodings | _Scaled,
    decode: Decode,
    info: TensorInfo,
    parts: Mapping[str, torch.Tensor],
    box: Box,
    out: torch.Tensor,
) -> None:
    """Decode a box by `decode`; of a smoothed weight by way of fp32, some rows at a time."""
    import torch

    if not box.numel:
        return
    if not is_smoothed(encoding.extra):
        decode(info, _unpacked(encoding, parts, box), box, out)
        return
    wide = TensorInfo(info.shape, "float32")
    factors = window(parts[SMOOTHING].reshape(-1), Box(box.offsets[-1:], box.sizes[-1:])).to(
        out.device, torch.float32
    )
    for some in row_major_boxes(Box.whole(box.sizes), chunk_numel(out.device, CHUNK_NUMEL)):
        inner = Box(tuple(map(sum, zip(box.offsets, some.offsets, strict=True))), some.sizes)
        values = torch.empty(some.sizes, dtype=torch.float32, device=out.device)
        here = _parts_within(encoding, wide, parts, box, inner)
        decode(wide, _unpacked(encoding, here, inner), inner, values)
        values.mul_(factors.narrow(0, some.offsets[-1], some.sizes[-1]))
        window(out, some).copy_(values)


def _unpacked(
    encoding: Encodings | _Scaled, parts: Mapping[str, torch.Tensor], box: Box
) -> Mapping[str, torch.Tensor]:
    return encoding.unpacked(parts, box) if isinstance(encoding, ModeloptI4) else parts


def _parts_within(
    encoding: Encodings | _Scaled,
    info: TensorInfo,
    parts: Mapping[str, torch.Tensor],
    box: Box,
    inner: Box,
) -> Mapping[str, torch.Tensor]:
    """Return of the parts of a box those of a box in it."""
    within = {}
    for name, part in parts.items():
        have, need = encoding.part_box(info, name, box), encoding.part_box(info, name, inner)
        if have is None or need is None:
            continue
        offsets = tuple(n - h for n, h in zip(need.offsets, have.offsets, strict=True))
        within[name] = window(part, Box(offsets, need.sizes))
    return within
