"""compressed-tensors' packed integers: codes of 1 to 8 bits, packed densely into int32 words along each row.

    w [out, in] T  ->  weight_packed     i32 [out, ceil(in * bits / 32)]
                       weight_scale      T [out, groups]; [1] for a single scale
                       weight_shape      i64 [2]
                       weight_zero_point i32 [ceil(out * bits / 32), groups]      asymmetric only
                       weight_g_idx      i32 [in], the group of each column       `actorder` only

    w'[i, j] = (code[i, j] - zero[i, g]) * scale[i, g]      g = j // group_size, or g_idx[j]

A code q is stored as q + 2^(bits-1), least significant bits first. In compressed-tensors 0.18 to 0.20
(compressors/pack_quantized) one code may span two words; up to 0.17 a word holds whole codes only
(`aligned`), which differs for 3, 5, 6 and 7 bits. Zero points of rows and groups are packed along the
rows; before 0.9.3, and for tensors and tiles, they are plain integers in the scale's shape. With 8 bits a
word is four bytes of codes with the upper bit inverted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoder, Refusal, Write
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.dequantize import dequantize
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule, TorchaoInt8
from ckptmap.quantization.blockwise.scaled_encoder import (
    Constants,
    ScaledEncoder,
    ScaledRecoder,
)
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding, rounded_products
from ckptmap.quantization.blockwise.word_packing import Packing, packed
from ckptmap.quantization.compressed_tensors.integer_encoder import IntegerEncoder, IntegerForm
from ckptmap.quantization.compressed_tensors.zeros_recoder import ZerosRecoder
from ckptmap.quantization.dense import flat
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

_FLOATS = ("float32", "float16", "bfloat16")
PACKED_ZERO = "int32"
"""The dtype of packed zero points; others are not packed and have the scale's shape."""


ACT_ORDER = (
    "has groups of columns in act-order (weight_g_idx, actorder 'group'), which compressed-tensors 0.20, and with it"
    " transformers, refuses to load; vLLM loads it; --to hf-bf16 decodes it"
)
"""`QuantizationArgs.validate_actorder` of compressed-tensors 0.20 raises for it."""


@dataclass(frozen=True)
class Packed(ScaledEncoding):
    """Packed integer codes: 1 to 8 bits. As a target of --to they have 8.

    ordered  `weight_g_idx` gives the group of each column
    aligned  no code spans two words
    """

    codes_part: ClassVar[str] = "packed"
    scale_part: ClassVar[str] = "scale"
    zero_part: ClassVar[str] = "zero_point"
    scheme: ClassVar[str] = "ct-packed"

    bits: int = 8
    ordered: bool = False
    aligned: bool = False

    @property
    def packing(self) -> Packing:
        return Packing(self.bits, self.aligned)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"ct-int{self.bits}"

    def part_key(self, key: str, part: str) -> str:
        return f"{key}_{part}"

    def refusal(self, info: TensorInfo) -> Refusal | None:
        if len(info.shape) != 2:
            return Refusal(f"packs matrices, found shape {list(info.shape)}")
        if not 1 <= self.bits <= 8:
            return Refusal(f"packs 1 to 8 bits, found {self.bits}")
        return super().refusal(info)

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        parts = super().parts(info)
        if isinstance(parts, Refusal):
            return parts
        rows, width = info.shape
        groups = self.scale_shape(info)[-1] if len(self.scale_shape(info)) == 2 else 1
        more = {
            "packed": TensorInfo((rows, self.packing.words(width)), "int32"),
            "shape": TensorInfo((2,), "int64"),
        }
        if self.zero_dtype == PACKED_ZERO:
            more["zero_point"] = TensorInfo((self.packing.words(rows), groups), PACKED_ZERO)
        if self.ordered:
            more["g_idx"] = TensorInfo((width,), "int32")
        return {**parts, **more}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if part == "shape":
            return Box((0,), (2,))
        if not box.numel:
            parts = self.parts(info)
            assert not isinstance(parts, Refusal)
            zeros = (0,) * len(parts[part].shape)
            return Box(zeros, zeros)
        (row, column), (rows, columns) = box.offsets, box.sizes
        if part == "packed":
            low, count = self.packing.span(column, columns)
            return Box((row, low), (rows, count))
        if part == "g_idx":
            return Box((column,), (columns,))
        grid = self._grid_box(info, box)
        if part == "zero_point" and self.zero_dtype == PACKED_ZERO:
            low, count = self.packing.span(grid.offsets[0], grid.sizes[0])
            return Box((low, grid.offsets[1]), (count, grid.sizes[1]))
        return block_geometry.stored_box(grid, self.scale_shape(info))

    def _grid_box(self, info: TensorInfo, box: Box) -> Box:
        """Return the box of scales; all groups of the rows where columns are in any order of groups."""
        if self.ordered:
            box = Box((box.offsets[0], 0), (box.sizes[0], info.shape[1]))
        return block_geometry.grid_box(box, self.block_of(info))

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """Return the stored shape of the scales; a single scale is stored as [1]."""
        return (1,) if self.block_of(info) == info.shape else super().scale_shape(info)

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        if not box.numel:
            return
        import torch

        codes = self.packing.unpacked(parts["packed"], box.offsets[1], box.sizes[1])
        grid = self._grid_box(info, box)
        scale = block_geometry.as_grid(parts["scale"], grid).to(torch.float32)
        zero = self._zero(parts["zero_point"], grid) if self.zero_dtype else None
        block = self.block_of(info)
        if self.ordered:
            index = self._groups(parts["g_idx"], scale.shape[1]).to(scale.device)
            scale = scale.index_select(1, index)
            zero = None if zero is None else zero.index_select(1, index)
            block = (block[0], 1)
        rounded = None
        if self.scale_dtype != info.dtype:  # the library computes in the dtype of the scales
            rounded = getattr(torch, self.scale_dtype)
        dequantize(codes, scale, zero, box, block, out, rounded=rounded)

    @property
    def host_parts(self) -> Collection[str]:
        """The groups of columns, which are checked before they are an index."""
        return ("g_idx",) if self.ordered else ()

    @staticmethod
    def _groups(index: torch.Tensor, count: int) -> torch.Tensor:
        """Return the group of each column, int64. Raises SourceError CKM115 for one that does not exist.

        A GPU that is given such an index refuses all later work of the process.
        """
        import torch

        bad = (index < 0).logical_or_(index >= count)
        if bool(bad.any()):
            raise SourceError(
                "CKM115",
                f"weight_g_idx: expected groups 0 to {count - 1}, found {int(index[bad][0])}",
                "it is damaged: download it again, or save the model again",
            )
        return index.to(torch.int64)

    def _zero(self, part: torch.Tensor, grid: Box) -> torch.Tensor:
        if self.zero_dtype != PACKED_ZERO:
            return block_geometry.as_grid(part, grid)
        along = part.transpose(0, 1).contiguous()
        return self.packing.unpacked(along, grid.offsets[0], grid.sizes[0]).transpose(0, 1)

    # ------------------------------------------------------------------ written

    def rule(self, info: TensorInfo) -> RoundingRule:
        return TorchaoInt8(self.scale_dtype)

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        if self.ordered:
            return Refusal("its columns are in an order of groups that calibration has chosen")
        return None

    def constants(self, info: TensorInfo) -> Constants:
        return {"shape": ("int64", info.shape)}

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        if self.bits != 8 or self.zero_dtype:
            return self._integer_encoder(info)
        inner = ScaledEncoder(
            info,
            self.block_of(info),
            self.rule(info),
            "packed",
            "scale",
            self.constants(info),
        )
        return PackedEncoder(inner, info.shape[1])

    def _integer_encoder(self, info: TensorInfo) -> Encoder:
        rows, columns = self.block_of(info)
        zero_rows = self.zero_dtype == PACKED_ZERO
        form = IntegerForm(
            self.bits,
            (rows, columns),
            bool(self.zero_dtype),
            "packed",
            True,
            self.aligned,
            zero_rows,
        )
        return IntegerEncoder((info.shape[0], info.shape[1]), form, self.constants(info))

    def rounded(self, info: TensorInfo) -> str:
        return rounded_scales(self.scale_dtype, info)

    def unread(self) -> str:
        """Return who loads groups of columns in any order: see `planning.quantization_config.ReadBySome`."""
        return ACT_ORDER if self.ordered else ""

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        has_zeros, block = bool(self.zero_dtype), self.block_of(info)
        if self.ordered or (has_zeros and (self.zero_dtype != PACKED_ZERO or block[0] != 1)):
            return None
        values = rounded_products(self.scale_dtype, info.dtype)
        name = f"int{self.bits} with zeros" if has_zeros else f"int{self.bits}"
        return CodeGrid(name, TensorInfo(info.shape, "int8"), block, values, zeros=has_zeros)

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the scales in fp32, in the grid's shape, and zero points where there are any."""
        if not self.zero_dtype:
            return super().scales(info, parts)
        import torch

        scales = replace(self, zero_dtype="").scales(info, parts)
        grid = block_geometry.grid_box(Box.whole(info.shape), self.block_of(info))
        return torch.stack([scales, self._zero(parts["zero_point"], grid).to(torch.float32)])

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return self.part_box(info, part, box) if part == "packed" else None

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        if box.numel:
            out.copy_(self.packing.unpacked(parts["packed"], box.offsets[1], box.sizes[1]))

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        if grid.zeros:
            return self._recoder_with_zeros(info, grid, device)
        inner = super().recoder(info, grid, device)
        if not isinstance(inner, ScaledRecoder):
            return None
        return PackedRecoder(inner, info.shape[1], self.packing)

    def _recoder_with_zeros(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        mine = self.grid(info)
        if mine is None or not mine.zeros or mine.name != grid.name:
            return None
        plain = replace(grid, name=f"int{self.bits}", zeros=False)
        inner = replace(self, zero_dtype="").recoder(info, plain, device)
        return None if inner is None else ZerosRecoder(inner, self.packing)

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {
            "native": "compressed-tensors", "bits": self.bits, "zero_dtype": self.zero_dtype,
            "ordered": self.ordered, "aligned": self.aligned,
        }  # fmt: skip


def packed_keeping(bits: int, info: TensorInfo, grid: CodeGrid) -> Packed | None:
    """Return the encoding for codes of so many bits by groups of columns, which stores their scales in the
    dtype that they have, and their zero points; None where it could not."""
    if len(grid.block) != 2 or grid.block[0] != 1 or info.shape[-1] % grid.block[1]:
        return None
    if not grid.zeros and not grid.scale_dtype:
        return None
    zero_dtype = PACKED_ZERO if grid.zeros else ""
    encoding = Packed(grid.block, grid.scale_dtype or "float32", zero_dtype, bits=bits)
    return encoding.keeping(info, grid)


def packed_rows(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Pack codes i8 [m], whole rows of `width` -> words i32 [m / width * ceil(width / 4)]."""
    import torch

    turned = codes.view(torch.uint8) ^ 0x80
    if width % 4:
        # The padding of a row is 0 bits, as compressed-tensors' is.
        turned = torch.nn.functional.pad(turned.view(-1, width), (0, -width % 4)).reshape(-1)
    return turned.view(torch.int32)


class PackedEncoder:
    """Encodes whole rows to 8-bit codes and packs them."""

    splittable = True
    state_nbytes = 0

    def __init__(self, inner: ScaledEncoder, width: int) -> None:
        self._inner, self._width = inner, width
        self.step = inner.step if inner.step % width == 0 else width

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        for write in self._inner.feed(offset, values):
            yield _packed(write, self._width) if write.part == "packed" else write

    def finish(self) -> Iterable[Write]:
        return self._inner.finish()


class PackedRecoder:
    """Packs the codes of whole rows unchanged."""

    state_nbytes = 0

    def __init__(self, inner: ScaledRecoder, width: int, packing: Packing) -> None:
        self._inner, self._width, self._packing = inner, width, packing
        self.step = width
        self.fidelity = inner.fidelity

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        for write in self._inner.feed(offset, codes, scales):
            yield self._packed(write)

    def _packed(self, write: Write) -> Write:
        bits, aligned = self._packing.bits, self._packing.aligned
        if bits == 8:
            return _packed(write, self._width)
        words = packed(write.values.view(-1, self._width), bits, aligned)
        first = write.box.offsets[0] // self._width * words.shape[1]
        return Write("packed", flat(first, words.numel()), words.view(-1))

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        return self._inner.finish(scales)


def _packed(write: Write, width: int) -> Write:
    words = packed_rows(write.values, width)
    first = write.box.offsets[0] // width * -(-width // 4)
    return Write("packed", flat(first, words.numel()), words)


def rounded_scales(scale_dtype: str, info: TensorInfo) -> str:
    """Return how transformers rounds scales: see `planning.quantization_config.RoundedOnLoading`.

    It casts every floating tensor of a file to the dtype of the model (5.23, `from_pretrained`).
    """
    if scale_dtype not in _FLOATS or scale_dtype == info.dtype or info.dtype == "float32":
        return ""
    return (
        f"its scales are {scale_dtype}, which from_pretrained casts to {info.dtype}: values differ where {info.dtype} does"
        " not hold a scale; ckptmap.load decodes them as they are"
    )
