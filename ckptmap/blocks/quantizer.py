"""Values to codes and scales in chunks that stay in cache, by the rule of a library.

Without their sign, floats order as the integers of their bits, NaN above infinity: the maximum of
integers is many times faster than that of 16-bit floats, and tells whether all is finite. Nothing
here waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.blocks.rules import Rule
from ckptmap.blocks.values import CHUNK_NUMEL

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Quantized:
    """Codes [r, w], scales [r] or [p, q] as they are stored, and the absmax that they came from."""

    codes: torch.Tensor
    scales: torch.Tensor
    absmax: torch.Tensor


def absmax_of(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The largest absolute value along `dims`, in the values' dtype, NaN where there is one."""
    import torch

    integer = torch.int32 if values.element_size() == 4 else torch.int16
    bits = values.view(integer).bitwise_and(torch.iinfo(integer).max)
    return bits.amax(dims).view(values.dtype)


def quantize_rows(values: torch.Tensor, rule: Rule) -> Quantized:
    """values [r, w] T, a block a row -> codes [r, w], scales [r]."""
    import torch

    rows, width = values.shape
    dtype = getattr(torch, rule.codes_dtype)
    step = max(1, CHUNK_NUMEL // width)
    codes, scales, peaks = [], [], []
    for start in range(0, rows, step):
        part = values.narrow(0, start, min(step, rows - start))
        if rule.takes:  # by way of float32: torch's cast from bfloat16 to float16 is slower
            part = part.to(torch.float32).to(getattr(torch, rule.takes))
        absmax = absmax_of(part, (1,))
        scale, operand = rule.scales(absmax)
        wide = part.to(torch.float32, copy=True)
        rule.apply(wide, operand.unsqueeze(1))
        codes.append(wide.to(dtype))
        scales.append(scale)
        peaks.append(absmax)
    return Quantized(_joined(codes), _joined(scales), _joined(peaks))


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def quantize_tiles(values: torch.Tensor, block: tuple[int, int], rule: Rule) -> Quantized:
    """values [r, w] T -> codes [r, w], scales [ceil(r / p), ceil(w / q)]; the last tile of a dim
    may be short."""
    import torch

    rows, width = values.shape
    dtype = getattr(torch, rule.codes_dtype)
    padded = [math.ceil(n / b) * b for n, b in zip(values.shape, block, strict=True)]
    edge = (0, padded[1] - width, 0, padded[0] - rows)
    wide = torch.nn.functional.pad(values.to(torch.float32, copy=True), edge)
    tiles = wide.view(padded[0] // block[0], block[0], padded[1] // block[1], block[1])
    absmax = absmax_of(tiles, (1, 3))
    scale, operand = rule.scales(absmax)
    rule.apply(tiles, operand.unsqueeze(1).unsqueeze(3))
    return Quantized(wide.narrow(0, 0, rows).narrow(1, 0, width).to(dtype), scale, absmax)
