"""Encode values to GPTQ's or AWQ's codes by rounding to the nearest, group by group.

    values [m, in] T  ->  qweight, qzeros, scales S [groups, out], perhaps g_idx

The scales and zero points are those of GPTQ's `Quantizer.find_params` (quant.py of the paper's code), which
AutoGPTQ and auto-round's plain rounding follow; the codes are those that AutoGPTQ packs for them, with the
scale rounded to S first:

    symmetric   scale = 2 max|x| / (2^bits - 1),            zero = 2^(bits-1)
    asymmetric  scale = (high - low) / (2^bits - 1),        zero = round(-low / scale)
    code = clamp(round(x / scale) + zero, 0, 2^bits - 1)

0 lies between low and high. A group of zeros has the range -1 to 1. This is the rule by which a changed weight
is written back; GPTQ and AWQ themselves choose codes by what a layer computes on calibration data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.quantization.dense import flat

if TYPE_CHECKING:
    import torch

BAND = 32
"""Rows that are encoded together: the codes of so many fill whole words."""


@dataclass(frozen=True)
class ColumnForm:
    """What the codes of one tensor are: see `GroupedColumns`.

    offset  what readers add to a stored zero point
    listed  is g_idx stored?
    """

    bits: int
    group: int
    scale_dtype: str
    symmetric: bool
    offset: int
    listed: bool


class WeightColumns:
    """A part of a weight of `rows` rows, filled band by band: to join bands at the end would take its memory twice."""

    def __init__(self, rows: int) -> None:
        self._rows, self._filled = rows, 0
        self._made: torch.Tensor | None = None

    def add(self, columns: torch.Tensor, rows: int) -> None:
        """Put the columns, which a band of `rows` rows makes, behind those that are there."""
        import torch

        height, width = columns.shape
        if self._made is None:
            full = -(-width * self._rows // rows)
            self._made = torch.empty(height, full, dtype=columns.dtype)
        self._made[:, self._filled : self._filled + width] = columns.cpu()
        self._filled += width

    @property
    def whole(self) -> torch.Tensor:
        assert self._made is not None and self._made.shape[1] == self._filled, "all bands were fed"
        return self._made


class ColumnEncoder:
    """Keeps the words of the whole tensor: they lie across the order in which values come."""

    splittable = False

    def __init__(
        self,
        shape: tuple[int, int],
        form: ColumnForm,
        pack: Callable[[torch.Tensor], torch.Tensor],
        pack_zeros: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._rows, self._width = shape
        self._form, self._pack, self._pack_zeros = form, pack, pack_zeros
        self.step = BAND * self._width
        groups = -(-self._width // form.group)
        self.state_nbytes = self._rows * (self._width * form.bits // 8 + groups * 5)
        self._words, self._scales, self._zeros = (WeightColumns(self._rows) for _ in range(3))

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """Encode values [m] T, whole bands of rows or the last ones. Raise RunError CKM309 where one is not finite."""
        rows = values.view(-1, self._width)
        for start in range(0, len(rows), BAND):
            band = rows[start : start + BAND]
            codes, scales, zeros = self._encoded(band)
            self._words.add(self._pack(codes), len(band))
            self._scales.add(scales.t(), len(band))
            self._zeros.add(zeros.t(), len(band))
        return ()

    def finish(self) -> Iterable[Write]:
        import torch

        yield column_write("qweight", self._words.whole)
        yield column_write("scales", self._scales.whole)
        yield column_write("qzeros", self._pack_zeros(self._zeros.whole))
        if self._form.listed:
            yield column_write(
                "g_idx", torch.arange(self._width, dtype=torch.int32) // self._form.group
            )

    def _encoded(self, band: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return signed codes i8 [r, in], scales S [r, groups] and stored zero points i8, signed, [r, groups]."""
        import torch

        form, most = self._form, (1 << self._form.bits) - 1
        wide = band.to(torch.float32)
        edge = -self._width % form.group
        if edge:  # zeros, which every group's range holds
            wide = torch.nn.functional.pad(wide, (0, edge))
        groups = wide.view(len(wide), -1, form.group)
        scales, zeros = self._scales_of(groups)
        stored = scales.to(getattr(torch, form.scale_dtype))
        _require_finite(stored)
        codes = torch.round(groups / stored.to(torch.float32).unsqueeze(2)).add_(zeros.unsqueeze(2))
        half = 1 << (form.bits - 1)
        signed = codes.clamp_(0, most).sub_(half).to(torch.int8).flatten(1)[:, : self._width]
        return signed, stored, (zeros - (half + form.offset)).to(torch.int8)

    def _scales_of(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales and zero points f32 [r, g] of groups [r, g, n]."""
        import torch

        form, most = self._form, (1 << self._form.bits) - 1
        low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
        if form.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        empty = (low == 0) & (high == 0)
        low, high = low.masked_fill(empty, -1), high.masked_fill(empty, 1)
        least = torch.finfo(getattr(torch, form.scale_dtype)).tiny
        scales = divide(high - low, float(most)).clamp_(min=least)
        if form.symmetric:
            return scales, torch.full_like(scales, 1 << (form.bits - 1))
        # A stored zero point holds no -1, so 0 cannot be one in the first version of GPTQ.
        return scales, torch.round(-low / scales).clamp_(form.offset, most)


def column_write(part: str, values: torch.Tensor) -> Write:
    return Write(part, flat(0, values.numel()), values.contiguous().view(-1))


def _require_finite(scales: torch.Tensor) -> None:
    if not bool(scales.isfinite().all()):
        raise RunError(
            "CKM309",
            f"expected finite values whose range fits {str(scales.dtype).removeprefix('torch.')}, the"
            " dtype of the scales, found others",
            "repair this tensor, or leave it unquantized with --no-encode",
        )
