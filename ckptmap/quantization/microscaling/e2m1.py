"""Codes of 4 bits floating point (E2M1): tables, rounding, packing and decoding.

    code: sign, 2 bits of exponent (bias 1), 1 bit of mantissa    0 0.5 1 1.5 2 3 4 6, and their negatives
    packed u8: two codes a byte, the even element in the low nibble

Source: OCP Microscaling Formats specification 1.0, section 5.3.3. A code times its scale is computed in fp32
and rounded once to T. Where the scale is a power of two that T holds, the product in T has the same bits,
which saves half of the memory traffic.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.chunks import constant

if TYPE_CHECKING:
    import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0
CHUNK_NUMEL = 512 * 1024
"""Elements at a time on a CPU: what they need stays in its cache."""


def values_of_codes(dtype: torch.dtype) -> torch.Tensor:
    """Return the 16 values by code."""
    import torch

    positive = torch.tensor(MAGNITUDES, dtype=dtype, device="cpu")
    return torch.cat([positive, -positive])


def _pairs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the two values of each byte side by side: [256] integers as wide as two of `dtype`."""
    import torch

    def made() -> torch.Tensor:
        values = values_of_codes(dtype)
        low, high = values.repeat(16), values.repeat_interleave(16)
        wide = torch.int32 if dtype.itemsize == 2 else torch.int64
        return torch.stack([low, high], dim=-1).view(wide).flatten()

    return constant(("e2m1 pairs", dtype), device, made)


def decode(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [r, blocks, 2 h] T, contiguous: packed u8 [r, blocks, h], scale [r, blocks].

    scale  of dtype T: the product is taken in T; float32: in fp32, and rounded to T
    """
    import torch

    dtype = scale.dtype
    room = out if dtype == out.dtype else torch.empty(out.shape, dtype=dtype, device=out.device)
    index = packed.reshape(-1).to(torch.int32)
    pairs = _pairs(out.device, dtype)
    torch.index_select(pairs, 0, index, out=room.view(-1).view(pairs.dtype))
    room.mul_(scale.unsqueeze(-1))
    if room is not out:
        out.copy_(room)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Round values of a floating dtype to the nearest code, u8, ties to the even one; beyond 6 the code is that of 6.

    The sign of a zero is kept. A NaN becomes any code. All values of 16 bits are looked up; a device
    compares others with limits, which takes it a third of the kernels that arithmetic does.
    """
    if values.element_size() == 2:
        return _looked_up(values)
    return _by_bits(values) if values.is_cpu else _by_limits(values)


def _by_bits(values: torch.Tensor) -> torch.Tensor:
    """`rounded` of float32 by the arithmetic of their bits."""
    import torch

    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # From 1 on: keep one bit of the mantissa, and count from the code of 1.0, which is 2.
    code = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22).sub_(252)
    code.clamp_(max=7)
    few = (magnitude > 0x3E800000).to(torch.int32).add_(magnitude >= 0x3F400000)  # 0.25, 0.75
    code = torch.where(magnitude < 0x3F800000, few, code)
    return code.bitwise_or_((bits >> 28) & 8).to(torch.uint8)


def _by_limits(values: torch.Tensor) -> torch.Tensor:
    """`rounded` of float32 by the least magnitude of each code."""
    import torch

    def made() -> torch.Tensor:
        middles = [(low + high) / 2 for low, high in pairwise(MAGNITUDES)]
        exact = torch.tensor(middles, dtype=torch.float32, device="cpu")
        above = exact.nextafter(torch.full_like(exact, torch.inf))
        is_even = torch.arange(7, device="cpu") % 2 == 0  # a tie belongs to the code below
        return torch.where(is_even, above, exact)

    limits = constant("e2m1 limits", values.device, made)
    code = torch.bucketize(values.abs(), limits, out_int32=True, right=True)
    return code.bitwise_or_((values.view(torch.int32) >> 28).bitwise_and_(8)).to(torch.uint8)


def _looked_up(values: torch.Tensor) -> torch.Tensor:
    """`rounded` of bfloat16 or float16, by a table of all their values."""
    import torch

    def made() -> torch.Tensor:
        every = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16)
        return _by_bits(every.view(values.dtype).to(torch.float32))

    codes = constant(("e2m1 codes", values.dtype), values.device, made)
    index = values.reshape(-1).view(torch.uint16).to(torch.int32)
    return codes.index_select(0, index).view(values.shape)


def pack(codes: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Pack codes u8 along a dim of even size: two to a byte, the first in the low nibble."""
    import torch

    dim %= codes.ndim
    shape = codes.shape
    low, high = codes.view(*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :]).unbind(dim + 1)
    return torch.add(low, high, alpha=16)
