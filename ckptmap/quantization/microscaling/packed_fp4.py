"""The base of encodings with packed 4-bit codes (E2M1) and a scale of 8 bits for each block of columns.

    w [.., rows, width] T  ->  packed u8 [.., rows, width / 2], scale 8 bits [.., rows, width / block]
    w'[.., i, j] = T(code[.., i, j] * scale[.., i, j // block])           in fp32, rounded once

A subclass names the parts and says what the scales mean. It may store the tensor transposed: then blocks run
along the second last dim of w, and `rows` is its last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Self

from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.protocols import Encoder, Refusal
from ckptmap.quantization.blockwise.chunks import chunk_numel, sent_behind
from ckptmap.quantization.blockwise.exponents import ExponentRule, powers
from ckptmap.quantization.blockwise.scaled_encoding import DTYPES
from ckptmap.quantization.extra_parts import Extra, HasExtraParts
from ckptmap.quantization.microscaling import e2m1
from ckptmap.quantization.microscaling.fp4_encoder import Fp4Encoder, Fp4Recoder
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

VALUES = "e2m1 * power of two in fp32"
POSITIVE_ZEROS = f"{VALUES}, the code of -0 read as 0"
"""How values follow from codes and scales; ggml has the second."""


@dataclass(frozen=True)
class PackedFp4(HasExtraParts):
    """Packed 4-bit codes, with exponents (E8M0) as scales unless a subclass says otherwise.

    scale_dtype   dtype of the stored scales
    packed_dtype  dtype of the stored bytes
    extra         further parts, which do not change the values
    """

    name: ClassVar[str]
    scheme: ClassVar[str]
    """The name of the scheme in records."""
    native: ClassVar[str]
    """The library that reads it, for records."""
    block: ClassVar[int] = 32
    transposed: ClassVar[bool] = False
    blocked: ClassVar[bool] = False
    """Whether the bytes of a block have a dim of their own: [.., rows, blocks, block / 2]."""
    rounding: ClassVar[str] = "up"
    """How exponents are chosen: see `ExponentRule`."""
    values_name: ClassVar[str] = VALUES

    scale_dtype: str = "uint8"
    packed_dtype: str = "uint8"
    extra: Extra = ()

    # ------------------------------------------------------------------ shapes

    def _turned(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return sizes or offsets as they are stored: the last two exchanged where it is transposed."""
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else sizes

    def refusal(self, info: TensorInfo) -> Refusal | None:
        """Return why the encoding cannot hold the tensor, None where it can."""
        if info.dtype not in DTYPES:
            return Refusal(f"holds {', '.join(DTYPES)}, found {info.dtype}")
        if len(info.shape) < 2 or not info.numel:
            return Refusal(f"holds matrices with elements, found shape {list(info.shape)}")
        width = self._turned(info.shape)[-1]
        if width % self.block:
            return Refusal(f"has blocks of {self.block}, which do not divide {width}")
        return None

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        refusal = self.refusal(info)
        if refusal is not None:
            return refusal
        *rows, width = self._turned(info.shape)
        grid = (*rows, width // self.block)
        packed = (*grid, self.block // 2) if self.blocked else (*rows, width // 2)
        return {
            "packed": TensorInfo(packed, self.packed_dtype),
            "scale": TensorInfo(self.scale_shape(grid), self.scale_dtype),
            **self.more_parts(info),
            **self.extra_infos,
        }

    def scale_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored shape of the scales of a grid of blocks."""
        return grid

    def more_parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        """Return the parts besides codes and scales that decoding needs."""
        return {}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return whole blocks of the codes, their scales, or all of another part."""
        if part not in ("packed", "scale"):
            parts = self.parts(info)
            assert not isinstance(parts, Refusal), "it was read"
            return Box.whole(parts[part].shape)
        grid = self.grid_box(box)
        if part == "scale":
            return self.scale_box(info, grid)
        half = self.block // 2
        if self.blocked:
            full = half if grid.numel else 0
            return Box((*grid.offsets, 0), (*grid.sizes, full))
        *at, first = grid.offsets
        *rows, count = grid.sizes
        return Box((*at, first * half), (*rows, count * half))

    def grid_box(self, box: Box) -> Box:
        """Return the box of the grid of blocks that a box of the tensor touches; empty for an empty one."""
        if not box.numel:
            return Box((0,) * len(box.sizes), (0,) * len(box.sizes))
        *at, first = self._turned(box.offsets)
        *rows, count = self._turned(box.sizes)
        low, high = first // self.block, -(-(first + count) // self.block)
        return Box((*at, low), (*rows, high - low))

    def scale_box(self, info: TensorInfo, grid: Box) -> Box:
        """Return the box of the stored scales for a box of the grid."""
        return grid

    # ------------------------------------------------------------------ values

    def decoded_scales(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], grid: Box
    ) -> torch.Tensor:
        """Return the scales of a box of the grid in fp32, in its shape. Raise SourceError CKM115."""
        return powers(parts["scale"], "scale").view(grid.sizes)

    def sent_scales(
        self,
        info: TensorInfo,
        parts: Mapping[str, torch.Tensor],
        grid: Box,
        device: torch.device,
    ) -> torch.Tensor:
        """Return `decoded_scales` on a device, of parts on the CPU. Raise SourceError CKM115."""
        return sent_behind(self.decoded_scales(info, parts, grid), device)

    @property
    def host_parts(self) -> Collection[str]:
        """The scales, which are checked before they are sent to a device."""
        return ("scale",)

    def exact_in(self, dtype: torch.dtype) -> bool:
        """Return whether every scale is held by T, and its products are those of fp32, rounded."""
        import torch

        return dtype in (torch.bfloat16, torch.float32)

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box; besides the parts it holds one chunk of values in memory."""
        import torch

        if not box.numel:
            return
        grid = self.grid_box(box)
        scale = self.sent_scales(info, parts, grid, out.device)
        if self.exact_in(out.dtype):
            scale = scale.to(out.dtype)
        codes = parts["packed"].view(torch.uint8).reshape(*grid.sizes, self.block // 2)
        first = self._turned(box.offsets)[-1] - grid.offsets[-1] * self.block
        for at in _indices(grid.sizes[:-2]):
            if self.transposed:
                _decode_columns(codes[at], scale[at], first, out[at])
            else:
                _decode_rows(codes[at], scale[at], first, out[at])

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        rule = ExponentRule(e2m1.LARGEST, self.rounding)
        return Fp4Encoder(
            info, rule, self.block, self.transposed, self.packed_dtype, self.scale_dtype
        )

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return {
            "scheme": self.scheme,
            "version": 1,
            "native": self.native,
            "block": list(self.block_of(info)),
            "scale_dtype": self.scale_dtype,
            "shape": list(info.shape),
            "dtype": info.dtype,
            "extra": self.extra_record,
            **self.more_record(info),
        }

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        """Return the fields that a format adds to its record."""
        return {}

    def block_of(self, info: TensorInfo) -> tuple[int, ...]:
        """Return the sizes of a block in the tensor, one a dim."""
        ones = (1,) * (len(info.shape) - 1)
        return self._turned((*ones, self.block))

    # ------------------------------------------------------------------ codes as they are

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        *rows, width = self._turned(info.shape)
        codes = TensorInfo((*rows, width // 2), "uint8")
        block = (*(1 for _ in rows), self.block // 2)
        axes = self._turned(tuple(range(len(info.shape)))) if self.transposed else ()
        return CodeGrid("e2m1", codes, block, self.values_name, axes)

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        return ("scale", *self.more_parts(info))

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.decoded_scales(info, parts, self.grid_box(Box.whole(info.shape)))

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if part != "packed":
            return None
        if not self.blocked:
            return box
        if not box.numel:
            zeros = (0,) * (len(box.sizes) + 1)
            return Box(zeros, zeros)
        half = self.block // 2
        *at, first = box.offsets
        *rows, count = box.sizes
        low, high = first // half, -(-(first + count) // half)
        return Box((*at, low, 0), (*rows, high - low, half))

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        import torch

        if not box.numel:
            return
        packed = parts["packed"].view(torch.uint8)
        if self.blocked:
            skip = box.offsets[-1] % (self.block // 2)
            packed = packed.flatten(-2).narrow(-1, skip, box.sizes[-1])
        out.copy_(packed)

    def keeping(self, info: TensorInfo, grid: CodeGrid) -> Self | None:
        """Return the encoding itself if it can take these codes unchanged, else None."""
        fits = not self.refusal(info) and self.recoder(info, grid, "cpu") is not None
        return self if fits else None

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return a recoder for codes of its own blocks whose scales are powers of two, too, else None.

        It is exact but for the sign of zeros that were read as positive.
        """
        read = replace(grid, values=self.values_name) if grid.values == POSITIVE_ZEROS else grid
        if self.grid(info) != read or self.extra:
            return None
        return Fp4Recoder(self.packed_dtype, self.scale_dtype, "exact" if read is grid else "codes")


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield every index of dims of these sizes."""
    return product(*(range(size) for size in sizes))


def _decode_rows(codes: torch.Tensor, scale: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """Fill `out` [rows, n] from codes [rows, blocks, half], scale [rows, blocks]; `first` is the place of its
    first column in the first block."""
    import torch

    rows, blocks, half = codes.shape
    width = 2 * half * blocks
    step = max(1, chunk_numel(out.device, e2m1.CHUNK_NUMEL) // width)
    for row in range(0, rows, step):
        some = min(step, rows - row)
        here, factors = codes.narrow(0, row, some), scale.narrow(0, row, some)
        place = out.narrow(0, row, some)
        if place.is_contiguous() and place.shape[1] == width:
            e2m1.decode(here, factors, place.view(some, blocks, 2 * half))
            continue
        made = torch.empty(some, blocks, 2 * half, dtype=out.dtype, device=out.device)
        e2m1.decode(here, factors, made)
        place.copy_(made.view(some, width).narrow(1, first, place.shape[1]))


def _decode_columns(
    codes: torch.Tensor, scale: torch.Tensor, first: int, out: torch.Tensor
) -> None:
    """Fill `out` [n, rows] with the transpose of what `_decode_rows` gives.

    Blocks of columns become whole rows of `out`: torch transposes into contiguous memory twice as fast.
    """
    import torch

    rows, blocks, half = codes.shape
    size = 2 * half
    step = max(1, chunk_numel(out.device, e2m1.CHUNK_NUMEL) // (rows * size))
    for block in range(0, blocks, step):
        some = min(step, blocks - block)
        made = torch.empty(rows, some, size, dtype=out.dtype, device=out.device)
        e2m1.decode(codes.narrow(1, block, some), scale.narrow(1, block, some), made)
        low, high = block * size - first, (block + some) * size - first
        start, stop = max(low, 0), min(high, out.shape[0])
        values = made.view(rows, some * size).narrow(1, start - low, stop - start)
        out.narrow(0, start, stop - start).copy_(values.t())
