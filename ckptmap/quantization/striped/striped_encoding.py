"""The base of HQQ's and quanto's packed weights: codes of groups, in stripes of rows.

    w [out, in] T  ->  codes [rows, width] u8 in words [step, width], a scale and a shift of each row,
                       or, `across`, of each column

`codes` are the values of w in row-major order: a row of them is a group, or, `across`, a column is one.
A subclass says how values follow from them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.protocols import Encoder, Encoding, Refusal
from ckptmap.quantization.blockwise.chunks import chunk_numel
from ckptmap.quantization.blockwise.dequantize import CHUNK_NUMEL
from ckptmap.quantization.blockwise.scaled_encoding import DTYPES
from ckptmap.quantization.dense import Dense
from ckptmap.quantization.extra_parts import Extra, HasExtraParts
from ckptmap.quantization.striped.stripes import Stripes
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CodeRows:
    """The codes of a weight: `across` tells whether a column is a group, else a row is one."""

    rows: int
    width: int
    across: bool = False


@dataclass(frozen=True)
class StripedEncoding(HasExtraParts, ABC):
    """Read only: no values are encoded."""

    codes_part: ClassVar[str]
    scale_part: ClassVar[str]
    shift_part: ClassVar[str]

    extra: Extra = ()

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def stripes(self) -> Stripes: ...

    @abstractmethod
    def layout(self, info: TensorInfo) -> CodeRows | Refusal:
        """Return the codes of a weight, or why it has none."""

    @abstractmethod
    def packed_parts(self, info: TensorInfo, layout: CodeRows) -> Mapping[str, TensorInfo]:
        """Return the words, scales and shifts."""

    def words(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the stored words [rows of words, width] as integers."""
        return stored.flatten(1)

    @abstractmethod
    def values(self, codes: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Return the values T of codes u8; scales T and shifts broadcast against them."""

    # ------------------------------------------------------------------ parts

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        if info.dtype not in DTYPES:
            return Refusal(f"holds {', '.join(DTYPES)}, found {info.dtype}")
        if not info.shape or not info.numel:
            return Refusal(f"holds tensors that have elements, found shape {list(info.shape)}")
        layout = self.layout(info)
        if isinstance(layout, Refusal):
            return layout
        return {**self.packed_parts(info, layout), **self.extra_infos}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return the rows of words, and of scales, that the rows of the box touch, or all of another part."""
        parts = self.parts(info)
        assert not isinstance(parts, Refusal), "it was read"
        shape, layout = parts[part].shape, self._layout(info)
        whole = part not in (self.codes_part, self.scale_part, self.shift_part)
        if whole or (layout.across and part != self.codes_part):
            return Box.whole(shape)
        low, high = self._rows(info, layout, box)
        if part == self.codes_part:
            low, high = self.stripes.touched(layout.rows, low, high)
        return Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))

    def _layout(self, info: TensorInfo) -> CodeRows:
        layout = self.layout(info)
        assert not isinstance(layout, Refusal), "it was read"
        return layout

    def _rows(self, info: TensorInfo, layout: CodeRows, box: Box) -> tuple[int, int]:
        """Return the first row of codes that holds a whole row of the box, and the one after the last."""
        if not box.numel:
            return 0, 0
        start, end = _flat(info, box)
        return start // layout.width, -(-end // layout.width)

    # ------------------------------------------------------------------ values

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box. One that is not whole rows is cut out of them."""
        import torch

        if not box.numel:
            return
        start, end = _flat(info, box)
        direct = end - start == box.numel and out.is_contiguous()
        flat = (
            out.view(-1) if direct else torch.empty(end - start, dtype=out.dtype, device=out.device)
        )
        self._fill(info, parts, box, flat)
        if direct:
            return
        cut = flat.view(box.sizes[0], *info.shape[1:])
        for dim in range(1, len(box.sizes)):
            cut = cut.narrow(dim, box.offsets[dim], box.sizes[dim])
        out.copy_(cut)

    def _fill(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, flat: torch.Tensor
    ) -> None:
        """Fill `flat` with the values of the rows of a box, a chunk of rows of codes at a time."""
        layout, stripes = self._layout(info), self.stripes
        low, high = self._rows(info, layout, box)
        words = self.words(parts[self.codes_part])
        first, _ = stripes.touched(layout.rows, low, high)
        begin, end = _flat(info, box)
        step = max(1, chunk_numel(flat.device, CHUNK_NUMEL) // layout.width)
        for top in range(low, high, step):
            bottom = min(top + step, high)
            at, after = stripes.touched(layout.rows, top, bottom)
            codes = stripes.unpack(words[at - first : after - first], layout.rows, top, bottom)
            scale, shift = (
                self._of_rows(parts[name], layout, top - low, bottom - low)
                for name in (self.scale_part, self.shift_part)
            )
            values = self.values(codes, scale, shift).view(-1)
            left, right = max(begin, top * layout.width), min(end, bottom * layout.width)
            values = values[left - top * layout.width : right - top * layout.width]
            flat[left - begin : right - begin] = values

    @staticmethod
    def _of_rows(part: torch.Tensor, layout: CodeRows, low: int, high: int) -> torch.Tensor:
        if layout.across:
            return part.reshape(1, -1)
        return part.reshape(-1, 1)[low:high]

    @abstractmethod
    def record(self, info: TensorInfo) -> Mapping[str, object] | None: ...

    # ------------------------------------------------------------------ read only

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        return Refusal(f"{self.name} is read, and not made anew")

    def afresh(self) -> Encoding:
        """Return the encoding that changed values are written in."""
        return Dense()

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        raise NotImplementedError(f"{self.name} is read only")


def _flat(info: TensorInfo, box: Box) -> tuple[int, int]:
    """Return the flat elements of the rows of a box: the first, and the one after the last."""
    inner = math.prod(info.shape[1:])
    return box.offsets[0] * inner, (box.offsets[0] + box.sizes[0]) * inner
