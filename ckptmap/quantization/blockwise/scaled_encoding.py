"""The base of encodings with 8-bit codes and one scale per block; a subclass names parts and a rounding rule.

    w [a, b] T  ->  codes [a, b] i8 or fp8, scale [ceil(a/p), ceil(b/q)], perhaps a zero point like scale
    w'[i, j] = (code[i, j] - zero) * scale[i // p, j // q] * factor       in fp32, rounded once to T

A subclass is a frozen dataclass. A box of the tensor is the same box of the codes, so any cut is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.errors import RunError
from ckptmap.protocols import Encoder, Refusal
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.chunks import sent_behind
from ckptmap.quantization.blockwise.dequantize import dequantize
from ckptmap.quantization.blockwise.exponents import DTYPES as EXPONENTS
from ckptmap.quantization.blockwise.exponents import powers
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule
from ckptmap.quantization.blockwise.scaled_encoder import Constants, ScaledEncoder, ScaledRecoder
from ckptmap.quantization.extra_parts import Extra, HasExtraParts
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
PRODUCTS = "code * scale in fp32"
POWERS = "code * power of two in fp32"
"""How values follow from codes and scales; the second is the first for some scales."""


def rounded_products(scale_dtype: str, dtype: str) -> str:
    """Return how values of `dtype` follow where the product is rounded to the dtype of the scales first."""
    is_rounded = scale_dtype not in (dtype, "float32")
    return f"{PRODUCTS}, rounded to {scale_dtype}" if is_rounded else PRODUCTS


@dataclass(frozen=True)
class ScaledEncoding(HasExtraParts):
    """8-bit codes with one scale per block of elements.

    block        sizes of a block, one a dim; () is one scale a row
    scale_dtype  dtype of the stored scales
    zero_dtype   dtype of the stored zero points, which have the scales' shape; "" without them
    extra        further parts, which do not change the values
    """

    name: ClassVar[str]
    scheme: ClassVar[str]
    """The name of the scheme in records."""
    codes_part: ClassVar[str]
    scale_part: ClassVar[str]
    zero_part: ClassVar[str] = ""
    codes_dtype: ClassVar[str] = "int8"
    factor: ClassVar[float] = 1.0
    """A constant that decoding multiplies by last, in fp32."""
    divides: ClassVar[bool] = False
    """Whether decoding divides by the scales."""

    block: tuple[int, ...] = ()
    scale_dtype: str = "float32"
    zero_dtype: str = ""
    extra: Extra = ()

    # ------------------------------------------------------------------ shapes

    def block_of(self, info: TensorInfo) -> tuple[int, ...]:
        if not self.block:
            return block_geometry.per_row(info.shape)
        return block_geometry.clamped(self.block, info.shape)

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """Return the shape of the stored scales, by default that of the grid."""
        return block_geometry.grid_shape(info.shape, self.block_of(info))

    def refusal(self, info: TensorInfo) -> Refusal | None:
        """Return why the encoding cannot hold the tensor, None where it can."""
        if info.dtype not in DTYPES:
            return Refusal(f"holds {', '.join(DTYPES)}, found {info.dtype}")
        if not info.shape or not info.numel:
            return Refusal(
                f"holds tensors that have dims and elements, found shape {list(info.shape)}"
            )
        if self.block and (len(self.block) != len(info.shape) or min(self.block) < 1):
            return Refusal(f"blocks of {list(self.block)} do not fit shape {list(info.shape)}")
        return None

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        refusal = self.refusal(info)
        if refusal is not None:
            return refusal
        shape = self.scale_shape(info)
        parts = {
            self.codes_part: TensorInfo(info.shape, self.codes_dtype),
            self.scale_part: TensorInfo(shape, self.scale_dtype),
        }
        if self.zero_dtype:
            parts[self.zero_part] = TensorInfo(shape, self.zero_dtype)
        return {**parts, **self.extra_infos}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return the same box of the codes, the scales of the blocks it touches, or all of another part."""
        if part == self.codes_part:
            return box
        if part in (self.scale_part, self.zero_part):
            grid = block_geometry.grid_box(box, self.block_of(info))
            return block_geometry.stored_box(grid, self.scale_shape(info))
        return Box.whole(self.extra_infos[part].shape)

    # ------------------------------------------------------------------ values

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box; besides the parts it holds one chunk of values in memory."""
        if not box.numel:
            return
        block = self.block_of(info)
        grid = block_geometry.grid_box(box, block)
        wide = self.wide_scales(parts[self.scale_part])
        wide = sent_behind(wide, out.device) if self.host_parts else wide
        scale = block_geometry.as_grid(wide, grid)
        zero = block_geometry.as_grid(parts[self.zero_part], grid) if self.zero_dtype else None
        codes = parts[self.codes_part]
        dequantize(codes, scale, zero, box, block, out, self.factor, divides=self.divides)

    def rule(self, info: TensorInfo) -> RoundingRule:
        """Return the rule by which values become codes."""
        raise NotImplementedError(type(self).__name__)

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        return ScaledEncoder(
            info, self.block_of(info), self.rule(info), self.codes_part, self.scale_part,
            self.constants(info),
        )  # fmt: skip

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        """Return why values cannot be encoded so: zero points, or parts that values do not determine.

        Scales of activations are no reason: they are carried over from where they are known.
        """
        if self.zero_dtype and not self.is_symmetric:
            return Refusal("its zero points are read, and none are made anew")
        for name, _, _ in self.extra:
            if name not in self.constants(info) and name not in self.activations:
                return Refusal(f"its part {name} is read, and not made anew")
        block = self.block_of(info)
        in_rows = all(n == 1 for n in block[:-1]) and info.shape[-1] % block[-1] == 0
        if len(block) != 2 and not in_rows:
            return Refusal(f"tiles of matrices are made anew, found shape {list(info.shape)}")
        return None

    def constants(self, info: TensorInfo) -> Constants:
        """Return the parts that do not depend on the values, with their contents."""
        return {}

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return {
            "scheme": self.scheme,
            "version": 1,
            "block": list(self.block or self.block_of(info)),
            "scale_dtype": self.scale_dtype,
            "shape": list(info.shape),
            "dtype": info.dtype,
            **self.more_record(info),
        }

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        """Return the fields that a format adds to its record."""
        return {}

    # ------------------------------------------------------------------ codes as they are

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        """Return the grid of its codes, None where zero points may differ from 0."""
        if self.zero_dtype and not self.is_symmetric:
            return None
        codes = TensorInfo(info.shape, self.codes_dtype)
        return CodeGrid(self.codes_dtype, codes, self.block_of(info), self.values_name)

    @property
    def is_symmetric(self) -> bool:
        """Whether the library always writes zero points of 0; `scales` checks it."""
        return False

    values_name: ClassVar[str] = PRODUCTS
    """How values follow from codes and scales: encodings with equal names decode equal inputs to equal bits."""

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        return (self.scale_part, self.zero_part) if self.zero_dtype else (self.scale_part,)

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the scales in fp32, in the grid's shape. Raises RunError CKM315 for a zero point other than 0."""
        if self.zero_dtype and bool(parts[self.zero_part].count_nonzero()):
            raise RunError(
                "CKM315",
                "its zero points are not all 0, and without them the codes of an asymmetric tensor mean "
                "other values",
                "decode it first (--to hf-bf16), then quantize; or keep it as it is (--no-encode)",
            )
        shape = block_geometry.grid_shape(info.shape, self.block_of(info))
        return self.wide_scales(parts[self.scale_part]).reshape(shape)

    @property
    def host_parts(self) -> Collection[str]:
        """Exponents, which are checked before they are sent to a device."""
        return (self.scale_part,) if self.scale_dtype in EXPONENTS else ()

    def wide_scales(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored scales in fp32. Raises SourceError CKM115 for an exponent that is NaN."""
        import torch

        if self.scale_dtype in EXPONENTS:
            return powers(stored, self.scale_part)
        return stored.to(torch.float32)

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return box if part == self.codes_part else None

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        out.copy_(parts[self.codes_part])

    def keeping(self, info: TensorInfo, grid: CodeGrid) -> Self | None:
        """Return the encoding itself if it can take these codes unchanged, else None."""
        fits = not self.refusal(info) and self.recoder(info, grid, "cpu") is not None
        return self if fits else None

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return a recoder for codes of its own dtype in its own blocks, or in blocks that it cuts, else None.

        It is exact if values follow alike.
        """
        mine = self.grid(info)
        same = mine is not None and (mine.name, mine.codes, mine.axes) == (
            grid.name, grid.codes, grid.axes,
        )  # fmt: skip
        if mine is None or not same or self.zero_dtype or self.extra_to_fill(info):
            return None
        if not block_geometry.cuts(mine.block, grid.block, info.shape):
            return None
        alike = mine.values == grid.values or (mine.values, grid.values) == (PRODUCTS, POWERS)
        exponents = (
            grid.values == POWERS and self.scale_dtype in EXPONENTS
        )  # under either dtype's name
        exact = alike and (exponents or self.scale_dtype in ("float32", grid.scale_dtype))
        return ScaledRecoder(
            self.codes_part, self.scale_part, self.scale_dtype,
            lambda scales: self.unscaled(block_geometry.spread(scales, grid.block, mine.block, info.shape)),
            self.constants(info), "exact" if exact else "codes",
        )  # fmt: skip

    def extra_to_fill(self, info: TensorInfo) -> bool:
        """Return whether it has parts that codes and scales do not determine."""
        return any(name not in self.constants(info) for name, _, _ in self.extra)

    def unscaled(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales s, with value = code * s, as this encoding stores them."""
        return scales
