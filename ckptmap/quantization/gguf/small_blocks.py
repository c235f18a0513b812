"""Decode ggml's types with blocks of 32 or 64 values: blocks u8 [n, bytes of a block] -> out f32 [n, values].

    Q8_0    d fp16, 32 codes of 8 bits               d * code
    Q4_0    d fp16, 32 codes of 4 bits               d * (code - 8)
    Q4_1    d, m fp16, 32 codes of 4 bits            d * code + m
    Q5_0    d fp16, 32 high bits, 32 low nibbles     d * (code - 16)
    Q5_1    d, m fp16, 32 high bits, 32 low nibbles  d * code + m
    IQ4_NL  d fp16, 32 codes of 4 bits               d * level
    MXFP4   e8m0, 32 codes of 4 bits                 2 ** (e - 128) * level
    NVFP4   4 x ue4m3, 64 codes of 4 bits            d / 2 * level, 16 values a scale

The low nibbles of a run of bytes come first, then the high ones. Source: ggml, src/ggml-quants.c
(`dequantize_row_*`). The bits are those of `gguf.quants.dequantize`: each product is rounded, then each sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.chunks import constant
from ckptmap.quantization.gguf.bits import bits, halves, levels, looked_up, nibbles

if TYPE_CHECKING:
    import torch

IQ4_LEVELS = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)  # fmt: skip
E2M1_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)  # fmt: skip


def q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(halves(blocks, 0))


def q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(nibbles(blocks[:, 2:], 16).flatten(1)).sub_(8.0).mul_(halves(blocks, 0))


def q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(nibbles(blocks[:, 4:], 16).flatten(1))
    out.mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(five_bits(blocks[:, 2:6], blocks[:, 6:])).sub_(16.0).mul_(halves(blocks, 0))


def q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(five_bits(blocks[:, 4:8], blocks[:, 8:]))
    out.mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Join high bits u8 [n, 4] and low nibbles u8 [n, 16] to codes u8 [n, 32]."""
    return nibbles(low, 16).flatten(1).bitwise_or_(bits(high) << 4)


def iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    codes = nibbles(blocks[:, 2:], 16).flatten(1)
    torch.mul(levels("iq4", IQ4_LEVELS, codes), halves(blocks, 0), out=out)


def powers(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scales of MXFP4: blocks u8 [n, 17] -> f32 [n, 1]; that of the exponent 255 is infinite."""
    return _halved_powers(blocks) * 2


def _halved_powers(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    table = powers_halved(blocks.device)
    return table.index_select(0, blocks[:, 0].to(torch.int32)).unsqueeze(-1)


def mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    scale = _halved_powers(blocks)
    codes = nibbles(blocks[:, 1:], 16).flatten(1)
    torch.mul(levels("e2m1", E2M1_DOUBLED, codes), scale, out=out)


def powers_halved(device: torch.device) -> torch.Tensor:
    """Return half of 2 ** (e - 127) for each byte e, f32 [256]; those of 0 and 1 are subnormal."""
    import torch

    def made() -> torch.Tensor:
        exponents = torch.arange(256, dtype=torch.int32, device="cpu")
        small = torch.full_like(exponents, 0x00200000) << exponents.clamp(max=1)
        return torch.where(exponents < 2, small, (exponents - 1) << 23).view(torch.float32)

    return constant("gguf e8m0 halved", device, made)


def nvfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    scale = looked_up("ue4m3", tuple(map(_ue4m3_halved, range(256))), blocks[:, :4])
    codes = nibbles(blocks[:, 4:], 8).view(-1, 4, 16)
    runs = out.view(-1, 4, 16)
    torch.mul(levels("e2m1", E2M1_DOUBLED, codes), scale.unsqueeze(-1), out=runs)


def _ue4m3_halved(code: int) -> float:
    """Return half the value of an unsigned E4M3 (bias 7); its sign bit is ignored, 0x7F is 0."""
    if code in (0, 0x7F):
        return 0.0
    exponent, mantissa = code >> 3 & 15, code & 7
    raw = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return raw * 0.5
