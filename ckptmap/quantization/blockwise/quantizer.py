"""Quantize rows or tiles by a library's rounding rule, on a CPU in chunks that stay in its cache.

    values [r, w] T  ->  codes [r, w] i8 or fp8, scales [r] or [ceil(r/p), ceil(w/q)]

Without their sign, floats order like the integers of their bits, with NaN above infinity. A maximum of
integers is many times faster than one of 16-bit floats, and also shows whether all values are finite.
Nothing here waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.chunks import chunk_numel
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule

if TYPE_CHECKING:
    import torch


CHUNK_NUMEL = 512 * 1024
"""Elements per chunk on a CPU."""


@dataclass(frozen=True)
class QuantizedBlocks:
    """Codes [r, w], scales as stored ([r], or one per tile), and the absmax they were computed from."""

    codes: torch.Tensor
    scales: torch.Tensor
    absmax: torch.Tensor


def absmax_of(
    values: torch.Tensor, dims: tuple[int, ...], spare: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the largest absolute value along `dims` in the values' dtype, NaN where there is one.

    `spare`, a float32 buffer of at least as many elements, is overwritten.
    """
    import torch

    integer = torch.int32 if values.element_size() == 4 else torch.int16
    bits, mask = values.view(integer), torch.iinfo(integer).max
    if spare is None:
        magnitude = bits.bitwise_and(mask)
    else:
        room = spare.view(-1).view(integer).narrow(0, 0, values.numel()).view(values.shape)
        magnitude = torch.bitwise_and(bits, mask, out=room)
    return magnitude.amax(dims).view(values.dtype)


def quantize_rows(values: torch.Tensor, rule: RoundingRule) -> QuantizedBlocks:
    """Quantize values [r, w] T, a block a row -> codes [r, w], scales [r]."""
    import torch

    rows, width = values.shape
    step = min(rows, max(1, chunk_numel(values.device, CHUNK_NUMEL) // width))
    wide = torch.empty((step, width), dtype=torch.float32) if values.is_cpu else None
    codes = (
        torch.empty((rows, width), dtype=getattr(torch, rule.codes_dtype))
        if values.is_cpu
        else None
    )
    quantized = []
    for start in range(0, rows, step):
        part = values.narrow(0, start, min(step, rows - start))
        rooms = [
            b if b is None else b.narrow(0, at, len(part)) for b, at in ((wide, 0), (codes, start))
        ]
        quantized.append(_quantize(part, rule, *rooms))
    scales, peaks = _joined([f.scales for f in quantized]), _joined([f.absmax for f in quantized])
    coded = _joined([f.codes for f in quantized]) if codes is None else codes
    return QuantizedBlocks(coded, scales, peaks)


def _quantize(
    values: torch.Tensor, rule: RoundingRule, wide: torch.Tensor | None, codes: torch.Tensor | None
) -> QuantizedBlocks:
    """Quantize rows, through the buffer `wide` into `codes` where given.

    On a CPU, memory that is new in each call costs more than all of the arithmetic.
    """
    import torch

    if rule.takes == "float32":
        values = values.to(torch.float32)  # not into `wide`, which is about to be overwritten
    elif rule.takes:  # by way of float32: torch's cast from bfloat16 to float16 is slower
        values = _as_float32(values, wide).to(getattr(torch, rule.takes))
    absmax = absmax_of(values, (1,), wide)
    scale, operand = rule.scales(absmax)
    made = _as_float32(values, wide)
    rule.apply(made, operand.unsqueeze(1))
    coded = made.to(getattr(torch, rule.codes_dtype)) if codes is None else codes.copy_(made)
    return QuantizedBlocks(coded, scale, absmax)


def _as_float32(values: torch.Tensor, wide: torch.Tensor | None) -> torch.Tensor:
    import torch

    return values.to(torch.float32, copy=True) if wide is None else wide.copy_(values)


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def quantize_tiles(
    values: torch.Tensor, block: tuple[int, int], rule: RoundingRule
) -> QuantizedBlocks:
    """Quantize values [r, w] T -> codes [r, w], scales [ceil(r/p), ceil(w/q)].

    The last tile of a dim may be short.
    """
    import torch

    rows, width = values.shape
    dtype = getattr(torch, rule.codes_dtype)
    padded = [math.ceil(n / b) * b for n, b in zip(values.shape, block, strict=True)]
    edge = (0, padded[1] - width, 0, padded[0] - rows)
    wide = values.to(torch.float32, copy=True)
    if any(edge):
        wide = torch.nn.functional.pad(wide, edge)
    tiles = wide.view(padded[0] // block[0], block[0], padded[1] // block[1], block[1])
    absmax = absmax_of(tiles, (1, 3))
    scale, operand = rule.scales(absmax)
    rule.apply(tiles, operand.unsqueeze(1).unsqueeze(3))
    return QuantizedBlocks(wide.narrow(0, 0, rows).narrow(1, 0, width).to(dtype), scale, absmax)
