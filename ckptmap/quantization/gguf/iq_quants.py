"""Decode ggml's IQ types: superblocks u8 [n, bytes] -> out f32 [n, 256].

A code is the number of a point of a grid (`grids`), 8 values or 4, with signs beside it:

    IQ2_XXS  8 of (4 numbers of 8 bits, 4 signs of 7 bits, scale of 4 bits)    d * (s + 1/2) / 4 * point
    IQ2_XS   32 of (number of 9 bits, sign of 7 bits), 16 scales of 4 bits     d * (s + 1/2) / 4 * point
    IQ2_S    32 numbers of 10 bits, 32 signs of 8 bits, 16 scales of 4 bits    d * (s + 1/2) / 4 * point
    IQ3_XXS  64 numbers of 8 bits, 8 of (4 signs of 7 bits, scale of 4 bits)   d * (s + 1/2) / 2 * point
    IQ3_S    64 numbers of 9 bits, 32 signs of 8 bits, 8 scales of 4 bits      d * (2 s + 1) * point
    IQ1_S    32 numbers of 11 bits, 8 of (scale of 3 bits, sign of 1/8)        d * (2 s + 1) * (point +- 1/8)
    IQ1_M    32 of (number of 11 bits, sign of 1/8), 16 scales of 3 bits       d * (2 s + 1) * (point +- 1/8)
    IQ4_XS   8 scales of 6 bits, minus 32; 256 codes of 4 bits                 d * s * level

A sign of 7 bits has an eighth that makes the number of negative values even. d is fp16; in IQ1_M it lies in the
high nibbles of the four words of scales. Source: ggml, src/ggml-common.h and src/ggml-quants.c
(`dequantize_row_iq2_xxs`, ...). The bits are those of `gguf.quants.dequantize`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.quantization.gguf import grids
from ckptmap.quantization.gguf.bits import (
    bits,
    even_signs,
    halves,
    levels,
    longs,
    nibbles,
    rows,
    shifted,
    signs,
    small_rows,
    words,
)
from ckptmap.quantization.gguf.small_blocks import IQ4_LEVELS

if TYPE_CHECKING:
    import torch

SEVENS = (0, 7, 14, 21)
"""Where the four signs of 7 bits begin in a word of 32."""
THREES = (0, 3, 6, 9)


def iq2_xxs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    pairs = longs(blocks, 2, 16).view(-1, 8, 2)
    numbers = shifted(pairs[..., 0], (0, 8, 16, 24), 255)
    scale = _half_more(halves(blocks, 0), pairs[..., 1] >> 28, 0.25)
    sign = even_signs(shifted(pairs[..., 1], SEVENS, 127).flatten(1).to(torch.uint8))
    _signed(out, grids.IQ2_XXS, numbers.flatten(1), sign, scale)


def iq2_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    codes = words(blocks, 2, 32)
    scale = _half_more(halves(blocks, 0), _pairs(blocks[:, 66:74]), 0.25)
    _signed(out, grids.IQ2_XS, codes & 511, even_signs(codes >> 9), scale)


def iq2_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    numbers = _joined(blocks[:, 2:34], shifted(blocks[:, 66:74], (0, 2, 4, 6), 3).flatten(1))
    scale = _half_more(halves(blocks, 0), _pairs(blocks[:, 74:82]), 0.25)
    _signed(out, grids.IQ2_S, numbers, signs(blocks[:, 34:66]), scale)


def iq3_xxs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    both = longs(blocks, 66, 8)
    sign = even_signs(shifted(both, SEVENS, 127).flatten(1).to(torch.uint8))
    scale = _half_more(halves(blocks, 0), both >> 28, 0.5)
    _signed(out, grids.IQ3_XXS, blocks[:, 2:66], sign, scale)


def iq3_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    numbers = _joined(blocks[:, 2:66], bits(blocks[:, 66:74]))
    scale = halves(blocks, 0) * (_pairs(blocks[:, 106:110]) * 2 + 1)
    _signed(out, grids.IQ3_S, numbers, signs(blocks[:, 74:106]), scale)


def iq1_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    high = words(blocks, 34, 8)
    numbers = _joined(blocks[:, 2:34], shifted(high, THREES, 7).flatten(1))
    scale = halves(blocks, 0) * ((high >> 12 & 7) * 2 + 1)
    _moved(out, numbers, (high >> 15).unsqueeze(-1), scale)


def iq1_m(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    packed = words(blocks, 48, 4)
    parts = (packed >> 12).unbind(1)
    whole = parts[0] | parts[1] << 4 | parts[2] << 8 | parts[3] << 12
    d = whole.to(torch.int16).view(torch.float16).to(torch.float32).unsqueeze(-1)
    scale = d * (shifted(packed, THREES, 7).flatten(1) * 2 + 1)
    high = _pairs(blocks[:, 32:48])
    numbers = _joined(blocks[:, :32], high & 7)
    _moved(out, numbers, (high >> 3).view(-1, 16, 2), scale)


def iq4_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    high = shifted(words(blocks, 2, 1), tuple(range(0, 16, 2)), 3).flatten(1)
    scale = (_pairs(blocks[:, 4:8]) | high << 4).to(torch.float32).sub_(32.0)
    codes = nibbles(blocks[:, 8:136], 16).view(-1, 8, 32)
    scale = (halves(blocks, 0) * scale).unsqueeze(-1)
    torch.mul(levels("iq4", IQ4_LEVELS, codes), scale, out=out.view(-1, 8, 32))


# -------------------------------------------------------------------------------- what they share


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of each byte side by side, the low one first: u8 [n, m] -> [n, 2 m]."""
    return shifted(values, (0, 4), 15).flatten(1)


def _joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the numbers of which `low` has 8 bits and `high` those above: i32 [n, m]."""
    import torch

    return low.to(torch.int32) | high.to(torch.int32) << 8


def _half_more(d: torch.Tensor, scale: torch.Tensor, factor: float) -> torch.Tensor:
    """Return d * (scale + 1/2) * factor, rounded after each product: f32 [n, groups]."""
    import torch

    return d.mul(scale.to(torch.float32).add_(0.5)).mul_(factor)


def _signed(
    out: torch.Tensor, grid: grids.CodePoints, numbers: torch.Tensor, sign: torch.Tensor, scale: torch.Tensor
) -> None:  # fmt: skip
    """Fill out [n, 256] with scale * point * sign: numbers [n, 256 / width], scale [n, groups].

    No point of these grids is 0, so integers keep every sign.
    """
    points = small_rows(grid.small_points(out.device), numbers).view(sign.shape).mul_(sign)
    out.copy_(points.view(out.shape))
    out.view(len(out), scale.shape[1], -1).mul_(scale.unsqueeze(-1))


def _moved(
    out: torch.Tensor, numbers: torch.Tensor, negative: torch.Tensor, scale: torch.Tensor
) -> None:
    """Fill out [n, 256] with scale * (point +- 1/8): negative [n, a, b], scale [n, groups]."""
    import torch

    points = rows(grids.IQ1_S.points(out.device), numbers)  # [n, 32, 8]
    moves = negative.to(torch.float32).mul_(-0.25).add_(0.125).view(out.shape[0], -1, 1)
    moved = points.view(out.shape[0], moves.shape[1], -1).add_(moves)
    groups = moved.reshape(out.shape[0], scale.shape[1], -1)
    out.copy_(groups.mul_(scale.unsqueeze(-1)).flatten(1))
