"""The base of GPTQ and AWQ: integer codes with a scale and a zero point for each group of inputs, stored as
[in, out] and packed into 32-bit words.

    w [out, in] T  ->  qweight i32, qzeros i32 [groups, out * bits / 32], scales S [groups, out],
                       perhaps g_idx i32 [in]

    w'[o, i] = T(S((code[i, o] - zero[g, o]) * scale[g, o]))          g = i // group, or g_idx[i]

A subclass says how words hold codes and zero points. The product is rounded to S, the dtype of the scales, and
then to T, as the libraries do: `QuantLinear.forward` (auto-round 0.16, auto_round_extension/torch) and
`dequantize_gemm` (AutoAWQ 0.2.9, awq/utils/packing_utils.py) multiply in S and cast to the dtype of the model.
Here codes and zero points are signed: 2^(bits-1) is subtracted from both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoder, Refusal
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.chunks import chunk_numel, constant, sent_behind
from ckptmap.quantization.blockwise.group_checks import CONTRADICTORY
from ckptmap.quantization.blockwise.scaled_encoding import DTYPES, rounded_products
from ckptmap.quantization.blockwise.word_packing import WORD, HoldsCodes, Packing
from ckptmap.quantization.gptq.column_encoder import ColumnEncoder, ColumnForm
from ckptmap.quantization.gptq.column_recoder import ColumnRecoder
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

CHUNK_NUMEL = 256 * 1024
"""Elements at a time on a CPU."""
UNORDERED, LISTED, ORDERED = "", "listed", "any"
"""What `g_idx` is: not stored; stored, and the groups are in their order; in any order."""


@dataclass(frozen=True)
class GroupedColumns(ABC):
    """Codes of one matrix.

    bits         of a code
    group        inputs that share a scale
    scale_dtype  S
    symmetric    whether the config states that every zero point is 2^(bits-1)
    order        what `g_idx` is
    """

    name: ClassVar[str]
    scheme: ClassVar[str]
    """The name of the scheme in records."""
    zero_offset: ClassVar[int] = 0
    """What is added to a stored zero point."""

    bits: int
    group: int
    scale_dtype: str = "float16"
    symmetric: bool = False
    order: str = UNORDERED

    # ------------------------------------------------------------------ shapes

    @property
    def packing(self) -> HoldsCodes:
        return Packing(self.bits)

    def part_key(self, key: str, part: str) -> str:
        stem, dot, _ = key.rpartition(".")
        return f"{stem}{dot}{part}"

    def refusal(self, info: TensorInfo) -> Refusal | None:
        """Return why the encoding cannot hold the tensor, None where it can."""
        if info.dtype not in DTYPES:
            return Refusal(f"holds {', '.join(DTYPES)}, found {info.dtype}")
        if self.scale_dtype not in DTYPES:
            return Refusal(f"has scales in {', '.join(DTYPES)}, found {self.scale_dtype}")
        if len(info.shape) != 2 or not info.numel:
            return Refusal(f"packs matrices with elements, found shape {list(info.shape)}")
        if not 2 <= self.bits <= 8:
            return Refusal(f"packs 2 to 8 bits, found {self.bits}")
        if any(size * self.bits % WORD for size in self.packed_sizes(info)):
            return Refusal(f"packs whole words, found shape {list(info.shape)}")
        return None

    def packed_sizes(self, info: TensorInfo) -> tuple[int, ...]:
        """Return the sizes along which codes and zero points are packed."""
        return info.shape

    @abstractmethod
    def words(self, info: TensorInfo) -> tuple[int, int]:
        """Return the shape of `qweight`."""

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        refusal = self.refusal(info)
        if refusal is not None:
            return refusal
        rows, width = info.shape
        groups = -(-width // self.group)
        parts = {
            "qweight": TensorInfo(self.words(info), "int32"),
            "qzeros": TensorInfo((groups, self.packing.words(rows)), "int32"),
            "scales": TensorInfo((groups, rows), self.scale_dtype),
        }
        return parts | ({"g_idx": TensorInfo((width,), "int32")} if self.order else {})

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if not box.numel:
            return Box((0,), (0,)) if part == "g_idx" else Box((0, 0), (0, 0))
        (row, column), (rows, columns) = box.offsets, box.sizes
        if part == "g_idx":
            return Box((column,), (columns,))
        if part == "qweight":
            return self.word_box(box)
        low, count = self._groups_of(info, box)
        if part == "scales":
            return Box((low, row), (count, rows))
        first, words = self.packing.span(row, rows)
        return Box((low, first), (count, words))

    @abstractmethod
    def word_box(self, box: Box) -> Box:
        """Return the box of `qweight` that holds the codes of a box of the tensor."""

    def _groups_of(self, info: TensorInfo, box: Box) -> tuple[int, int]:
        """Return the first group and the number of groups that a box needs; all in any order of them."""
        column, columns = box.offsets[1], box.sizes[1]
        if self.order == ORDERED:
            column, columns = 0, info.shape[1]
        low = column // self.group
        return low, -(-(column + columns) // self.group) - low

    # ------------------------------------------------------------------ values

    @property
    def host_parts(self) -> Collection[str]:
        """The groups of columns, which are checked before they are an index."""
        return ("g_idx",) if self.order else ()

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box; besides the parts it holds one chunk of values in memory."""
        if not box.numel:
            return
        first, count = self._groups_of(info, box)
        scale = parts["scales"].t().contiguous()
        zero = self.zero_points(parts["qzeros"], box.offsets[0], box.sizes[0])
        index = self._index(parts, box, first, count)
        for inner in self.bands(box, out.device):
            at, rows = inner.offsets[0] - box.offsets[0], inner.sizes[0]
            codes = self.unpacked(parts["qweight"], box, inner)
            values = self._values(codes, zero[at : at + rows], scale[at : at + rows], index)
            out.narrow(0, at, rows).copy_(values.view(rows, -1))

    def bands(self, box: Box, device: torch.device) -> Iterator[Box]:
        """Yield the box in bands of rows that are computed at once, whole words of AWQ's each."""
        (row, column), (rows, width) = box.offsets, box.sizes
        most = max(1, chunk_numel(device, CHUNK_NUMEL) // width // 8) * 8
        end = row + rows
        while row < end:
            after = min(end, (row // 8) * 8 + most)
            yield Box((row, column), (after - row, width))
            row = after

    @abstractmethod
    def unpacked(self, words: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
        """Return the codes i8 [rows, columns] of `inner`; `words` are those of `box`, which has its columns."""

    def zero_points(self, words: torch.Tensor, row: int, rows: int) -> torch.Tensor:
        """Return the zero points [rows, groups] of words [groups, n]: i8, of 8 bits i16."""
        import torch

        zeros = self.packing.unpacked(words, row, rows).t().contiguous()
        if self.bits == 8:
            zeros = zeros.to(torch.int16)
        return zeros.add_(self.zero_offset) if self.zero_offset else zeros

    def _index(
        self, parts: Mapping[str, torch.Tensor], box: Box, first: int, count: int
    ) -> torch.Tensor | None:
        """Return the place of each column's group among those read, int64; None: whole groups follow
        each other. Raise SourceError CKM115 where g_idx is none, or contradicts the order stated."""
        import torch

        column, columns = box.offsets[1], box.sizes[1]
        device = parts["qweight"].device
        if self.order:
            self.check_index(parts["g_idx"], column, first + count)
        if self.order == ORDERED:
            return sent_behind(parts["g_idx"].to(torch.int64), device)
        if column % self.group == 0 and columns % self.group == 0:
            return None
        key = "groups", column, columns, self.group
        return constant(key, device, lambda: torch.arange(column, column + columns) // self.group - first)  # fmt: skip

    def check_index(self, index: torch.Tensor, column: int, groups: int) -> None:
        """Raise SourceError CKM115 unless `index` i32 [n], from `column` on, names groups as stated.

        A GPU that is given an index beyond the groups refuses all later work of the process.
        """
        import torch

        if self.order == ORDERED:
            bad = (index < 0).logical_or_(index >= groups)
            said, hint = f"expected groups 0 to {groups - 1}", "it is damaged: download it again"
        else:
            want = torch.arange(column, column + len(index), dtype=torch.int32) // self.group
            bad = index != want
            said = (
                f"its config states desc_act false and group_size {self.group}, so groups in order"
            )
            hint = CONTRADICTORY
        if bool(bad.any()):
            at = int(bad.int().argmax())
            found = f"found group {int(index[at])} at input {column + at}"
            raise SourceError("CKM115", f"g_idx: {said}, {found}", hint)

    def _values(
        self,
        codes: torch.Tensor,
        zero: torch.Tensor,
        scale: torch.Tensor,
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return S((code - zero) * scale) for codes [r, c], groups [r, g] and an index of groups [c]."""
        import torch

        if index is None:
            codes = codes.view(len(codes), -1, self.group)
            zero, scale = zero.unsqueeze(2), scale.unsqueeze(2)
        else:
            zero, scale = zero.index_select(1, index), scale.index_select(1, index)
        # Of 7 bits and less the difference fits into 8: from -2^7 to 2^7 - 1.
        shifted = codes.sub_(zero) if self.bits < 8 else codes - zero
        return shifted.to(torch.float32).mul_(scale.to(torch.float32)).to(scale.dtype)

    # ------------------------------------------------------------------ codes as they are

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        """Return the grid of its codes; None where groups are in any order, or the last one is short."""
        if self.order == ORDERED or info.shape[1] % self.group:
            return None
        zeros = not self.symmetric
        return CodeGrid(
            f"int{self.bits} with zeros" if zeros else f"int{self.bits}",
            TensorInfo(info.shape, "int8"), (1, self.group),
            rounded_products(self.scale_dtype, info.dtype), zeros=zeros, scale_dtype=self.scale_dtype,
        )  # fmt: skip

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        return ("scales", "qzeros", "g_idx") if self.order else ("scales", "qzeros")

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return scales, and zero points where there are any. Raise SourceError CKM115 where what the
        config states of zero points or groups is not what is stored."""
        import torch

        if self.order:
            self.check_index(parts["g_idx"], 0, len(parts["scales"]))
        scales = parts["scales"].t().to(torch.float32).contiguous()
        zeros = self.zero_points(parts["qzeros"], 0, info.shape[0])
        if not self.symmetric:
            return torch.stack([scales, zeros.to(torch.float32)])
        if bool(zeros.count_nonzero()):
            half = 1 << (self.bits - 1)
            low, high = int(zeros.amin()) + half, int(zeros.amax()) + half
            raise SourceError(
                "CKM115",
                f"its config states symmetric codes, so zero points of {half}, found {low} to {high}",
                CONTRADICTORY,
            )
        return scales

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return self.part_box(info, part, box) if part == "qweight" else None

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        for inner in self.bands(box, out.device) if box.numel else ():
            at = inner.offsets[0] - box.offsets[0]
            out.narrow(0, at, inner.sizes[0]).copy_(self.unpacked(parts["qweight"], box, inner))

    # ------------------------------------------------------------------ written

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        """Return why changed values cannot be encoded so; None: they can."""
        if self.order == ORDERED:
            return Refusal(
                "its inputs are in an order of groups that calibration has chosen (desc_act)"
            )
        return None

    @property
    def _form(self) -> ColumnForm:
        return ColumnForm(
            self.bits,
            self.group,
            self.scale_dtype,
            self.symmetric,
            self.zero_offset,
            bool(self.order),
        )

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        rows, width = info.shape
        return ColumnEncoder((rows, width), self._form, self.packed_band, self.packed_zeros)

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return a recoder for codes of as many bits in its own blocks, or in blocks that it cuts, else None.

        Symmetric codes get zero points in the middle; zero points need a form whose config allows them.
        """
        mine = None if self.refusal(info) else self.grid(info)
        names = (f"int{self.bits}", f"int{self.bits} with zeros")
        if mine is None or grid.name not in names or (grid.zeros and self.symmetric):
            return None
        if (mine.codes, mine.axes) != (grid.codes, grid.axes):
            return None
        if not block_geometry.cuts(mine.block, grid.block, info.shape):
            return None
        rows, width = info.shape
        exact = mine.values == grid.values and self.scale_dtype in ("float32", grid.scale_dtype)
        return ColumnRecoder(
            (rows, width), self._form, (self.packed_band, self.packed_zeros),
            lambda scales: block_geometry.spread(scales, grid.block, mine.block, info.shape),
            "exact" if exact else "codes",
        )  # fmt: skip

    @abstractmethod
    def packed_band(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes i8 [r, in] of whole bands of 32 rows, or the last ones -> columns of `qweight`."""

    @abstractmethod
    def packed_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        """Pack stored zero points i8 [groups, out], signed as codes are -> `qzeros`."""

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return {
            "scheme": self.scheme,
            "version": 1,
            "native": self.name,
            "block": [1, self.group],
            "scale_dtype": self.scale_dtype,
            "shape": list(info.shape),
            "dtype": info.dtype,
            "bits": self.bits,
            "symmetric": self.symmetric,
            "order": self.order,
        }
