"""Quantize moments of an optimizer to 8 or 4 bits as torchao does, and compute values from codes.

    m [n] f32 -> scale [n/block], codes [n] u8, or [n/2] with the first of two in the high nibble
    m'[i] = qmap[code[i]] * scale[i / block]

Bit-equal to `copy_` into OptimState8bit, OptimState4bit and OptimStateFp8 (torchao 0.18,
optim/quant_utils.py and subclass_*.py): the quotient is m / max(absmax, 1e-12); its code is the
last one whose value is not above it, or the next if the rest is at least half of the step, all in
float32. Both differences are monotone in the quotient, so that there is a threshold for each code.
Work goes in chunks that stay in a CPU's cache, on a device in larger ones.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise import fourbit
from ckptmap.quantization.blockwise.bucketize import FineBucketizer
from ckptmap.quantization.blockwise.chunks import chunk_numel, sent
from ckptmap.quantization.blockwise.exact_division import divide

if TYPE_CHECKING:
    import torch

CHUNK_NUMEL = 256 * 1024
LEAST = 1e-12
_LARGEST_FP8 = 448.0
_ULPS = 128
"""Units in the last place around the middle of two values in which a threshold is searched."""

_bucketizers: dict[tuple[bytes, str], FineBucketizer | None] = {}


# ------------------------------------------------------------------------------- encoding


def encode(
    values: torch.Tensor,
    block: int,
    qmap: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
) -> bool:
    """Quantize values f32 [n], n a multiple of the block, into `codes` and `scale` f32 [n/block].

    `codes` are u8, two to a byte if `qmap` has 16 values; float8 without a `qmap`. Return False,
    with nothing written, where the table is not ascending and so has no thresholds.
    """
    bucketizer = None if qmap is None else _bucketizer(qmap)
    if qmap is not None and bucketizer is None:
        return False
    flat, out = values.reshape(-1), codes.view(-1)
    packed = _packed(qmap)
    step = max(1, chunk_numel(codes.device, CHUNK_NUMEL) // block) * block
    for start in range(0, flat.numel(), step):
        part = flat.narrow(0, start, min(step, flat.numel() - start))
        peaks = scale.narrow(0, start // block, part.numel() // block)
        place = out.narrow(0, start // packed, part.numel() // packed)
        _encode(part, block, bucketizer, place, peaks)
    return True


def _encode(
    values: torch.Tensor,
    block: int,
    bucketizer: FineBucketizer | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    import torch

    blocks = values.view(-1, block)
    scale.copy_(blocks.abs().amax(1).clamp_(min=LEAST))
    if bucketizer is None:
        divide(scale, _LARGEST_FP8, out=scale)
        codes.copy_(torch.div(blocks, scale.unsqueeze(1)).view(-1))
        return
    quotient = torch.div(blocks, scale.unsqueeze(1)).view(-1)
    packs_two = codes.numel() < values.numel()
    unpacked = codes.new_empty(values.numel()) if packs_two else codes
    bucketizer.bucketize(quotient, torch.empty_like(quotient), unpacked)
    if packs_two:
        pack(unpacked, codes)


def encode_each(
    values: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor | None, codes: torch.Tensor
) -> None:
    """Quantize values f32 [n] into `codes`, each by its own scale f32 [n]; codes of 4 bits fill their last byte
    with 0. `qmap` is ascending."""
    import torch

    bucketizer = None if qmap is None else _bucketizer(qmap)
    assert qmap is None or bucketizer is not None, "torchao's tables are ascending"
    flat, packed = values.reshape(-1), _packed(qmap)
    step = max(1, chunk_numel(codes.device, CHUNK_NUMEL) // packed) * packed
    for start in range(0, flat.numel(), step):
        quotient = flat[start : start + step] / scale[start : start + step]
        out = codes.view(-1)[start // packed : -(-(start + len(quotient)) // packed)]
        if bucketizer is None:
            out.copy_(quotient)
            continue
        unpacked = codes.new_zeros(len(out) * packed) if packed > 1 else out
        filled = unpacked[: len(quotient)]
        bucketizer.bucketize(quotient, torch.empty_like(quotient), filled)
        if packed > 1:
            pack(unpacked, out)


def pack(unpacked: torch.Tensor, codes: torch.Tensor) -> None:
    """Fill `codes` with codes of 4 bits, two to a byte, the first of two in the high nibble."""
    import torch

    torch.bitwise_or(unpacked[::2] << 4, unpacked[1::2], out=codes)


def unpack(codes: torch.Tensor, packed: int) -> torch.Tensor:
    """Return codes one to an element, flat: of 4 bits two for each byte."""
    import torch

    flat = codes.view(-1)
    return flat if packed == 1 else torch.stack([flat >> 4, flat & 0b1111], dim=1).view(-1)


def _packed(qmap: torch.Tensor | None) -> int:
    """Return how many codes make a byte."""
    return 2 if qmap is not None and qmap.numel() == 16 else 1


@cache
def _of_tables() -> MutableMapping[torch.Tensor, tuple[int, FineBucketizer | None]]:
    """Return table -> its version and bucketizer, for tables that are still in use."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


def _bucketizer(qmap: torch.Tensor) -> FineBucketizer | None:
    """Return the bucketizer of a table; the first time, a table on a device is copied to the CPU."""
    version = 0 if qmap.is_inference() else qmap._version
    known, bucketizer = _of_tables().get(qmap, (-1, None))
    if known == version:
        return bucketizer
    on_cpu = qmap.detach().cpu()
    key = on_cpu.numpy().tobytes(), str(qmap.device)
    if key not in _bucketizers:
        limits = thresholds(on_cpu)
        _bucketizers[key] = None if limits is None else FineBucketizer(sent(limits, qmap.device))
    _of_tables()[qmap] = version, _bucketizers[key]
    return _bucketizers[key]


def thresholds(qmap: torch.Tensor) -> torch.Tensor | None:
    """Return for qmap [m] f32 ascending the thresholds [m - 1]: the least quotient of each code but
    the first."""
    import torch

    lower, upper = qmap.narrow(0, 0, qmap.numel() - 1), qmap.narrow(0, 1, qmap.numel() - 1)
    middle = (lower.double() + upper.double()).div_(2).float().view(torch.int32)
    around = torch.arange(-_ULPS, _ULPS + 1, dtype=torch.int32)
    near = (middle.unsqueeze(1) + around).view(torch.float32).sort(dim=1).values
    below = near - lower.unsqueeze(1) < ((upper - lower) * 0.5).unsqueeze(1)
    count = below.sum(1, keepdim=True)
    if bool((count == 0).any()) or bool((count > 2 * _ULPS).any()):
        return None
    return near.gather(1, count).squeeze(1)


# ------------------------------------------------------------------------------- decoding


def decode(
    codes: torch.Tensor, block: int, qmap: torch.Tensor | None, scale: torch.Tensor
) -> torch.Tensor:
    """Return codes of whole blocks as flat float32; only the last block may be short."""
    import torch

    codes, packed = codes.view(-1), _packed(qmap)
    out = torch.empty(codes.numel() * packed, dtype=torch.float32, device=codes.device)
    table = fourbit.pairs(qmap) if qmap is not None and packed == 2 else qmap
    step = max(1, chunk_numel(codes.device, CHUNK_NUMEL) // block) * block
    for start in range(0, out.numel(), step):
        part = out.narrow(0, start, min(step, out.numel() - start))
        part_codes = codes.narrow(0, start // packed, part.numel() // packed)
        if table is None:
            part.copy_(part_codes)
        else:
            torch.index_select(table, 0, part_codes.to(torch.int32), out=part.view(table.dtype))
        _scale(part, scale.narrow(0, start // block, -(-part.numel() // block)), block)
    return out


def decode_each(
    codes: torch.Tensor, qmap: torch.Tensor | None, scale: torch.Tensor
) -> torch.Tensor:
    """Return codes, each of which has a scale of its own, as flat float32."""
    unpacked = unpack(codes, _packed(qmap))[: scale.numel()]
    values = unpacked.float() if qmap is None else qmap.index_select(0, unpacked.int())
    return values.mul_(scale)


def _scale(values: torch.Tensor, scale: torch.Tensor, block: int) -> None:
    whole = values.numel() // block
    if whole:
        blocks = values.narrow(0, 0, whole * block).view(-1, block)
        blocks.mul_(scale.narrow(0, 0, whole).unsqueeze(1))
    if whole < scale.numel():
        rest = values.numel() - whole * block
        values.narrow(0, whole * block, rest).mul_(scale.narrow(0, whole, 1))
