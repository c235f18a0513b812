"""Encode values to integer codes of 1 to 8 bits with a scale a block, and perhaps a zero point.

    values [m, in] T  ->  codes i8 or packed words, scales T [m/p, in/q], zero points

The arithmetic is that of compressed-tensors 0.20 for the smallest and the largest value of each block
(quantization/utils/helpers.py `calculate_qparams`, lifecycle/forward_helpers.py `_quantize`), bit for bit:
all of it in T, with 0 always representable, and T's epsilon as the scale of a block of zeros.

    symmetric   scale = max(|low|, |high|) / ((2^bits - 1) / 2),  code = round(x / scale)
    asymmetric  scale = (high - low) / (2^bits - 1),  zero = round(-2^(bits-1) - low / scale),
                code = round(x / scale + zero)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.quantization.blockwise.not_finite import NotFinite
from ckptmap.quantization.blockwise.scaled_encoder import Constants, constant_writes
from ckptmap.quantization.blockwise.word_packing import packed
from ckptmap.quantization.dense import flat

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class IntegerForm:
    """What the codes of one tensor are.

    bits       of a code
    block      rows and columns that share a scale
    zeros      have blocks a zero point?
    codes      the part of the codes
    packed     are codes packed into words of 32 bits?
    aligned    does no code span two words?
    zero_rows  are zero points packed along the rows? Else they are stored as the scales are
    """

    bits: int
    block: tuple[int, int]
    zeros: bool
    codes: str
    packed: bool
    aligned: bool = False
    zero_rows: bool = False

    @property
    def low(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        return (1 << (self.bits - 1)) - 1


class IntegerEncoder:
    """Encodes whole rows of blocks; packed zero points are written at the end."""

    def __init__(self, shape: tuple[int, int], form: IntegerForm, constants: Constants) -> None:
        self._width, self._form, self._constants = shape[1], form, constants
        self._columns = -(-shape[1] // form.block[1])
        self.step = form.block[0] * shape[1]
        self.splittable = not form.zero_rows
        bands = -(-shape[0] // form.block[0])
        self.state_nbytes = bands * self._columns if form.zero_rows else 0
        self._zeros: list[tuple[int, torch.Tensor]] = []
        self._finite = NotFinite()

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """Encode values [m] T, where m and `offset` are multiples of `step`, but for the last rows."""
        tiles = self._tiles(values.view(-1, self._width))
        scales, zeros = self._scales(tiles)
        self._finite.note(scales)
        codes = self._codes(tiles, scales, zeros, values.numel() // self._width)
        first = offset // self.step * self._columns
        yield self._codes_write(offset, codes)
        yield Write("scale", flat(first, scales.numel()), scales.view(-1))
        if zeros is None:
            return
        if self._form.zero_rows:
            self._zeros.append((first, zeros.cpu()))
        else:
            yield Write("zero_point", flat(first, zeros.numel()), zeros.view(-1))

    def finish(self) -> Iterable[Write]:
        """Yield the packed zero points and the constant parts. Raises RunError CKM309 where a scale is not finite."""
        self._finite.require_none()
        if self._zeros:
            yield self._packed_zeros()
        yield from constant_writes(self._constants)

    def _tiles(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [r, in] as [r/p, p, in/q, q], padded with zeros, which every block holds."""
        import torch

        tall, wide = self._form.block
        edge = (0, -values.shape[1] % wide, 0, -values.shape[0] % tall)
        if any(edge):
            values = torch.nn.functional.pad(values, edge)
        return values.view(-1, tall, self._columns, wide)

    def _scales(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scales T [r/p, in/q] and zero points i8 of the same shape."""
        import torch

        low, high = tiles.amin((1, 3)).clamp_(max=0), tiles.amax((1, 3)).clamp_(min=0)
        steps = (1 << self._form.bits) - 1
        spread = high - low if self._form.zeros else torch.maximum(low.abs(), high)
        scales = divide(spread, float(steps) if self._form.zeros else steps / 2)
        zeros = None
        if self._form.zeros:
            # A block of zeros divides 0 by 0 in the library, whose zero point is then 0.
            at = (self._form.low - low / scales).clamp_(self._form.low, self._form.high)
            zeros = at.nan_to_num_(nan=0.0).round_().to(torch.int8)
        scales.masked_fill_(scales == 0, torch.finfo(scales.dtype).eps)
        return scales, zeros

    def _codes(
        self, tiles: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, rows: int
    ) -> torch.Tensor:
        """Return the codes i8 [rows, in]."""
        import torch

        scaled = tiles / scales[:, None, :, None]
        if zeros is not None:
            scaled += zeros.to(scaled.dtype)[:, None, :, None]
        codes = scaled.clamp_(self._form.low, self._form.high).round_().to(torch.int8)
        return codes.view(-1, codes.shape[2] * codes.shape[3])[:rows, : self._width]

    def _codes_write(self, offset: int, codes: torch.Tensor) -> Write:
        part, rows = self._form.codes, offset // self._width
        if not self._form.packed:
            return Write(part, flat(offset, codes.numel()), codes.reshape(-1))
        words = packed(codes, self._form.bits, self._form.aligned)
        return Write(part, flat(rows * words.shape[1], words.numel()), words.view(-1))

    def _packed_zeros(self) -> Write:
        """Return all zero points [r/p, in/q], packed along the first dim."""
        import torch

        ordered = [zeros for _, zeros in sorted(self._zeros, key=lambda noted: noted[0])]
        along = torch.cat(ordered).transpose(0, 1).contiguous()
        words = packed(along, self._form.bits, self._form.aligned).transpose(0, 1).contiguous()
        return Write("zero_point", flat(0, words.numel()), words.view(-1))
