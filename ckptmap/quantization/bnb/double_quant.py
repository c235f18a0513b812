"""bitsandbytes' double quantization: the absmax of blocks stored in 8 bits, with a scale per 256 of them.

    absmax [m] f32  ->  offset (their mean), q [m] u8, scale [ceil(m/256)] f32
    absmax'[i] = dynamic[q[i]] * scale[i // 256] + offset

The dynamic map of 256 values is that of "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861,
section 2.2), as bitsandbytes 0.50 writes it. Each value gets the nearest one, a tie the lower one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.chunks import chunk_numel
from ckptmap.quantization.blockwise.eight_bit_scales import ScaleLevels
from ckptmap.storage.process_guards import one_torch_thread

if TYPE_CHECKING:
    import torch

BLOCK = 256
"""The only block size that the kernels of bitsandbytes support."""
CHUNK = 1 << 16
"""Scales per chunk, a multiple of the block."""


def dynamic_map() -> torch.Tensor:
    """Return the 256 values in ascending order, float32.

    For each power of ten down to 1e-6 they are the middles of 2**k equal steps from 0.1 to 1, with k = 6
    for the largest; in both signs, and with zero and one.
    """
    import torch

    values = [0.0, 1.0]
    for k in range(7):
        edges = torch.linspace(0.1, 1, 2**k + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2.0).mul(10 ** (k - 6)).tolist()
        values += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(values), dtype=torch.float32)


def quantize(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Quantize absmax [m] f32 -> q [m] u8, scale [ceil(m/256)] f32, offset, as bitsandbytes computes them."""
    import torch

    with one_torch_thread(True):
        offset = float(absmax.mean())
    values = dynamic_map()
    middles = (values[:-1] + values[1:]) / 2
    codes = torch.empty(absmax.shape, dtype=torch.uint8)
    scale = torch.empty(-(-absmax.numel() // BLOCK), dtype=torch.float32)
    for start in range(0, absmax.numel(), CHUNK):
        part = absmax[start : start + CHUNK] - offset
        blocks = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        peaks = scale[start // BLOCK :][: len(blocks)]
        torch.amax(blocks.abs(), 1, out=peaks)
        quotient = blocks * peaks.clamp(min=1e-38).reciprocal().unsqueeze(-1)
        indices = torch.bucketize(quotient.flatten()[: part.numel()], middles, out_int32=True)
        codes[start : start + CHUNK] = indices
    return codes, scale, offset


def requantize(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Quantize an absmax that was read from a quantized tensor; see `ScaleLevels`.

    Scales that were double quantized before get their own numbers again. The offset is the median, and
    nothing is clipped.
    """
    import torch

    grid = ScaleLevels(dynamic_map(), BLOCK, torch.float32, divides=False)
    offset, scale = grid.fitted(absmax)
    codes = torch.empty(absmax.shape, dtype=torch.uint8)
    for start in range(0, absmax.numel(), grid.step):
        part = absmax[start : start + grid.step]
        units = scale[start // BLOCK :][: -(-part.numel() // BLOCK)]
        codes[start : start + part.numel()] = grid.coded(part, offset, units).at
    return codes, scale, float(offset)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    values: torch.Tensor,
    offset: float,
    block: int,
    first: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantize codes [m] u8 -> absmax [m] f32; `values` is the dynamic map.

    The first code is number `first` within the first scale's block. Products are rounded to `dtype`
    before the offset is added.
    """
    import torch

    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    added = torch.tensor(offset).to(dtype).item()  # of the CPU, so that no device is waited for
    skipped = first % block
    step = chunk_numel(codes.device, CHUNK)
    for start in range(0, codes.numel(), step):
        part = codes.narrow(0, start, min(step, codes.numel() - start))
        low = (skipped + start) // block
        high = -(-(skipped + start + part.numel()) // block)
        spread = scale.narrow(0, low, high - low).repeat_interleave(block)
        spread = spread.narrow(0, (skipped + start) % block, part.numel())
        product = out.narrow(0, start, part.numel())
        torch.index_select(values, 0, part.to(torch.int32), out=product)
        product.mul_(spread)
        if dtype == torch.float32:
            product.add_(added)
        else:
            product.copy_(product.to(dtype).add_(added))
    return out
