"""Decode ggml's K types and ternary types: superblocks u8 [n, bytes] -> out f32 [n, 256].

            scales of groups             codes                                value
    Q2_K    16 x (4 bits, 4 bits)        2 bits                               d * s * code - m * t
    Q3_K    16 x 6 bits, minus 32        2 bits, and 1 high bit               d * s * (code - 4)
    Q4_K    8 x (6 bits, 6 bits)         4 bits                               d * s * code - m * t
    Q5_K    8 x (6 bits, 6 bits)         4 bits, and 1 high bit               d * s * code - m * t
    Q6_K    16 x int8                    4 bits, and 2 high bits              d * s * (code - 32)
    TQ1_0   -                            5 ternary digits a byte, base 3      d * (digit - 1)
    TQ2_0   -                            2 bits                               d * (code - 1)

d and m are fp16. Source: ggml, src/ggml-common.h (`block_q4_K`, ...) and src/ggml-quants.c
(`dequantize_row_q4_K`, ...). The bits are those of `gguf.quants.dequantize`: d * s is rounded first, then its
product with the code, then the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.chunks import constant
from ckptmap.quantization.gguf.bits import halves, nibbles, spread

if TYPE_CHECKING:
    import torch

BY_TWO = (0, 2, 4, 6)
EACH_BIT = tuple(range(8))


def q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales = blocks[:, :16]
    groups = out.view(-1, 16, 16)
    groups.copy_(spread(blocks[:, 16:80], 32, BY_TWO, 3).view(-1, 16, 16))
    groups.mul_((halves(blocks, 80) * (scales & 15)).unsqueeze(-1))
    groups.sub_((halves(blocks, 82) * (scales >> 4)).unsqueeze(-1))


def q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    low = spread(blocks[:, 96:104], 8, (0, 4), 15).view(-1, 16)
    high = spread(blocks[:, 104:108], 4, BY_TWO, 3).view(-1, 16)
    scale = low.bitwise_or_(high << 4).to(torch.float32).sub_(32.0)
    codes = spread(blocks[:, 32:96], 32, BY_TWO, 3).view(-1, 8, 32)
    codes.bitwise_or_(spread(blocks[:, :32], 32, EACH_BIT, 1).view(-1, 8, 32) << 2)
    groups = out.view(-1, 16, 16)
    groups.copy_(codes.view(-1, 16, 16)).sub_(4.0)
    groups.mul_((halves(blocks, 108) * scale).unsqueeze(-1))


def q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    groups = out.view(-1, 8, 32)
    groups.copy_(nibbles(blocks[:, 16:144], 32).view(-1, 8, 32))
    _scale_and_shift(blocks, groups)


def q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    codes = nibbles(blocks[:, 48:176], 32).view(-1, 8, 32)
    codes.bitwise_or_(spread(blocks[:, 16:48], 32, EACH_BIT, 1).view(-1, 8, 32) << 4)
    groups = out.view(-1, 8, 32)
    groups.copy_(codes)
    _scale_and_shift(blocks, groups)


def _scale_and_shift(blocks: torch.Tensor, groups: torch.Tensor) -> None:
    """Turn codes f32 [n, 8, 32] into values, by the scales of Q4_K and Q5_K.

    The 12 bytes from byte 4 on hold 8 scales and 8 minima of 6 bits: those of groups 0 to 3 lie in the low bits
    of bytes 0 to 3 and 4 to 7, the others in the nibbles of bytes 8 to 11, and their two high bits above the
    former.
    """
    import torch

    first, second, both = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scale = torch.cat([first & 63, (both & 15) | ((first >> 2) & 48)], dim=-1)
    low = torch.cat([second & 63, (both >> 4) | ((second >> 2) & 48)], dim=-1)
    groups.mul_((halves(blocks, 0) * scale).unsqueeze(-1))
    groups.sub_((halves(blocks, 2) * low).unsqueeze(-1))


def q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    codes = nibbles(blocks[:, :128], 64).view(-1, 8, 32)
    codes.bitwise_or_(spread(blocks[:, 128:192], 32, BY_TWO, 3).view(-1, 8, 32) << 4)
    groups = out.view(-1, 16, 16)
    groups.copy_(codes.view(-1, 16, 16)).sub_(32.0)
    scale = blocks[:, 192:208].view(torch.int8).to(torch.float32)
    groups.mul_((halves(blocks, 208) * scale).unsqueeze(-1))


def tq1_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    at = 0
    for low, high, width, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        count = width * digits
        out.narrow(1, at, count).copy_(_digits(blocks[:, low:high], digits).flatten(1))
        at += count
    out.sub_(1.0).mul_(halves(blocks, 52))


def _digits(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ternary digits of bytes, each a fraction of 256: u8 [n, w] -> [n, count, w]."""
    import torch

    def powers() -> torch.Tensor:
        return torch.tensor([3**n for n in range(count)], dtype=torch.uint8, device="cpu")

    factors = constant(("gguf powers of 3", count), values.device, powers).unsqueeze(-1)
    turned = values.unsqueeze(1) * factors  # modulo 256
    return (turned.to(torch.int16) * 3) >> 8


def tq2_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(spread(blocks[:, :64], 32, BY_TWO, 3).flatten(1)).sub_(1.0)
    out.mul_(halves(blocks, 64))
