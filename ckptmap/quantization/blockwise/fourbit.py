"""4-bit quantization with one absmax per block: tables of 16 values, codes, and decoding.

    w [n] T  ->  absmax [ceil(n/block)] f32, codes [ceil(n/2)] u8, the first of two in the high nibble
    w'[i] = table[code[i]] * absmax[i // block]      in float32, rounded once to T

The arithmetic is that of bitsandbytes 0.50, backends/default/ops.py: the quotient `w * (1 / absmax)` and
the product are float32. A short last block is divided instead of multiplied. The code is the number of
midpoints below the quotient (see `bucketize`), so a tie takes the lower value. Work goes in chunks that
stay in a CPU's cache, on a device in larger ones (see `chunks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptmap.core.devices import indexed
from ckptmap.core.formatting import counted
from ckptmap.core.strided_dims import flat_span
from ckptmap.errors import RunError
from ckptmap.quantization.blockwise.bucketize import Bucketizer
from ckptmap.quantization.blockwise.chunks import chunk_numel, constant, sent
from ckptmap.tensors import Box, TensorInfo, contiguous_strides

if TYPE_CHECKING:
    import torch

CHUNK_NUMEL = 512 * 1024
"""Elements per chunk on a CPU: larger temporaries leave the cache and cost page faults."""
LEAST_ABSMAX = 1e-38
"""A smaller absmax is replaced by this, so that its inverse is finite."""

# QLoRA, arXiv:2305.14314, appendix E, as float32; and FP4 with 2 exponent bits and 1 mantissa bit
# over its largest value, in the order of bit patterns: the sign is the upper bit.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = tuple(value / 12.0 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
ZERO_PAIR = {"nf4": 0x77, "fp4": 0x00}
"""The byte that holds two codes of zero."""
NEAR_ZERO = 1 / 64
"""Up to this share of the largest scale, a scale may come from a scale of 0 stored in 8 bits."""

_bucketizers: dict[tuple[str, str], Bucketizer] = {}


def table_values(kind: str) -> tuple[float, ...]:
    """Return the 16 values by code."""
    return NF4 if kind == "nf4" else (*_FP4, 0.0, *(-value for value in _FP4[1:]))


def table(kind: str) -> torch.Tensor:
    """Return the 16 values by code, float32 on the CPU, which callers must not change."""
    import torch

    return constant(
        ("4-bit values", kind),
        "cpu",
        lambda: torch.tensor(table_values(kind), dtype=torch.float32, device="cpu"),
    )


# ------------------------------------------------------------------------------- encoding


def _bucketizer(kind: str, device: str) -> Bucketizer:
    """Return the bucketizer of the midpoints between neighbours; a quotient at a midpoint is below it.

    The CPU computes them for every device.
    """
    import torch

    device = indexed(device)
    bucketizer = _bucketizers.get((kind, device))
    if bucketizer is not None:
        return bucketizer
    ordered, codes = table(kind).sort(stable=True)
    middles = (ordered.narrow(0, 0, 15) + ordered.narrow(0, 1, 15)) / 2
    above = middles.nextafter(torch.full_like(middles, torch.inf))
    bucketizer = Bucketizer(sent(above, device), sent(codes.to(torch.uint8), device))
    if type(above) is torch.Tensor:  # a fake one must not outlive its mode
        _bucketizers[kind, device] = bucketizer
    return bucketizer


class FourBitQuantizer:
    """Computes codes and absmax of blocks, in chunks, with reused buffers."""

    def __init__(self, kind: str, numel: int, block: int, dtype: torch.dtype, device: str) -> None:
        import torch

        self._block = block
        most = chunk_numel(device, CHUNK_NUMEL) // block
        self._chunk = max(1, min(-(-numel // block), most)) * block
        self._bucketizer = _bucketizer(kind, device)
        self._integer = torch.int32 if dtype.itemsize == 4 else torch.int16
        self._spare = torch.empty(self._chunk, dtype=torch.int32, device=device)
        self._quotient = torch.empty(self._chunk, dtype=torch.float32, device=device)
        self._code = torch.empty(self._chunk, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """The size of the buffers."""
        held = (self._spare, self._quotient, self._code)
        return sum(b.numel() * b.element_size() for b in held)

    def run(self, values: torch.Tensor, absmax: torch.Tensor, packed: torch.Tensor) -> None:
        """Quantize values [m] T -> absmax [ceil(m/block)] f32, packed [ceil(m/2)] u8.

        The last block may be short, in the last call only.
        """
        whole = values.numel() - values.numel() % self._block
        for start in range(0, whole, self._chunk):
            n = min(self._chunk, whole - start)
            scale = absmax.narrow(0, start // self._block, n // self._block)
            self._whole(values.narrow(0, start, n), scale, packed.narrow(0, start // 2, n // 2))
        if whole < values.numel():
            first = whole // self._block
            rest = values.narrow(0, whole, values.numel() - whole)
            place = packed.narrow(0, whole // 2, packed.numel() - whole // 2)
            self._short(rest, absmax.narrow(0, first, 1), place)

    def _whole(self, values: torch.Tensor, absmax: torch.Tensor, packed: torch.Tensor) -> None:
        import torch

        n = values.numel()
        # Without their sign, floats order as the integers of their bits, NaN above infinity.
        magnitude = self._spare.view(self._integer).narrow(0, 0, n)
        torch.bitwise_and(values.view(self._integer), torch.iinfo(self._integer).max, out=magnitude)
        peaks = magnitude.view(-1, self._block).amax(1).view(values.dtype)
        torch.mul(peaks, 1, out=absmax)  # a copy to float32
        inverse = absmax.clamp(min=LEAST_ABSMAX).reciprocal_()
        quotient = self._quotient.narrow(0, 0, n)
        blocks = (-1, self._block)
        torch.mul(values.view(blocks), inverse.unsqueeze(-1), out=quotient.view(blocks))
        self._pack(quotient, packed)

    def _short(self, values: torch.Tensor, absmax: torch.Tensor, packed: torch.Tensor) -> None:
        import torch

        torch.clamp(values.abs().amax().float().view(1), min=LEAST_ABSMAX, out=absmax)
        quotient = values.float() / absmax
        if quotient.numel() % 2:
            quotient = torch.cat([quotient, quotient.new_zeros(1)])
        self._pack(quotient, packed)

    def _pack(self, quotient: torch.Tensor, packed: torch.Tensor) -> None:
        n = quotient.numel()
        spare, code = self._spare.narrow(0, 0, n), self._code.narrow(0, 0, n)
        self._bucketizer.bucketize(quotient, spare, code)
        pack(code, spare, packed)


def pack(codes: torch.Tensor, spare: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack codes [n] u8, each below 16 -> packed [n/2] u8, the first of two in the high nibble.

    `spare` [n] i32 is overwritten.
    """
    import torch

    if not packed.is_cpu:  # one kernel; a CPU does not vectorize it
        first, second = codes.view(-1, 2).unbind(1)
        torch.add(second, first, alpha=16, out=packed)
        return
    pairs = codes.view(torch.int16)  # first + second * 256
    sixteen = spare.view(torch.int16).narrow(0, 0, pairs.numel())
    torch.mul(pairs, 4097, out=sixteen)  # modulo 2^16: first + (first * 16 + second) * 256
    torch.bitwise_right_shift(sixteen, 8, out=packed)  # the low byte of it


# ------------------------------------------------------------------------------- decoding


def pairs(values: torch.Tensor) -> torch.Tensor:
    """Return the two values of each byte side by side: values [16] T -> [256] integers as wide as two T."""
    import torch

    count = values.numel()
    first, second = values.unsqueeze(1).expand(count, count), values.expand(count, count)
    wide = {2: torch.int32, 4: torch.int64}[values.element_size()]
    return torch.stack([first, second], dim=-1).view(wide).flatten()


class FourBitDequantizer:
    """Decodes blocks, at most `numel` (even) elements per call, into a reused buffer."""

    def __init__(self, numel: int, kind: str, device: torch.device) -> None:
        import torch

        self._pairs = constant(("4-bit pairs", kind), device, lambda: pairs(table(kind)))
        self._values = torch.empty(numel, dtype=torch.float32, device=device)

    def run(self, packed: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
        """Dequantize packed [ceil(m/2)] u8, scale [ceil(m/block)] f32 -> values [m] f32, m even.

        The values are valid until the next call.
        """
        import torch

        m = 2 * packed.numel()
        values = self._values.narrow(0, 0, m)
        index = packed.to(torch.int32)
        torch.index_select(self._pairs, 0, index, out=values.view(torch.int64))
        whole = m // block
        blocks = values.narrow(0, 0, whole * block).view(-1, block)
        blocks.mul_(scale.narrow(0, 0, whole).unsqueeze(-1))
        if whole < scale.numel():
            values.narrow(0, whole * block, m - whole * block).mul_(scale.narrow(0, whole, 1))
        return values


class ZeroBlocks:
    """Finds blocks of zeros among kept codes.

    The scale of such a block may come out as anything in 8 bits, of any sign, and must not matter.
    """

    def __init__(self, kind: str, step: int) -> None:
        """Prepare for blocks of `step` code bytes each."""
        self._zeros, self._step = ZERO_PAIR[kind], step
        self._found: list[torch.Tensor] = []

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Clear blocks of zeros: codes u8 from flat `offset` on, scales of the whole tensor -> codes to store.

        In a block whose scale is 0 every code becomes the code of zero.
        """
        import torch

        first, numel = offset // self._step, codes.numel()
        part = scales.narrow(0, first, -(-numel // self._step))
        near = part.abs() <= part.abs().amax() * NEAR_ZERO
        if not bool(near.any()):
            return codes
        padded = torch.nn.functional.pad(codes, (0, -numel % self._step), value=self._zeros)
        blocks = padded.view(-1, self._step).masked_fill((part == 0).unsqueeze(-1), self._zeros)
        at = near.nonzero().flatten()
        self._found.append(first + at[(blocks[at] == self._zeros).all(1)])
        return blocks.flatten()[:numel]

    def hidden(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the scales, 0 in blocks of zeros."""
        import torch

        return scales.index_fill(0, torch.cat(self._found), 0) if self._found else scales


def check_finite(absmax: torch.Tensor, block: int) -> None:
    """Raise RunError CKM309 where a block held NaN or infinity."""
    bad = absmax.isfinite().logical_not()
    count = int(bad.sum())
    if count:
        at = int(bad.int().argmax()) * block
        raise RunError(
            "CKM309",
            f"expected finite values, found NaN or infinity in {counted(count, 'block')} of {block}, the first"
            f" within flat elements {at} to {at + block - 1}",
            "leave this tensor unquantized with --no-encode, or repair it",
        )


# ------------------------------------------------------------------------------- boxes


def blocks_of(info: TensorInfo, box: Box, block: int) -> tuple[int, int]:
    """Return the first and last + 1 of the blocks that a box's flat span touches.

    An empty box, which may begin where the tensor ends, touches none.
    """
    if box.numel == 0:
        return 0, 0
    start, stop = flat_span(info.shape, box)
    return start // block, -(-stop // block)


def slabs(
    info: TensorInfo, box: Box, out: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor, tuple[int, ...]]]:
    """Yield parts of a box that are small enough to decode at once.

    Each is (flat start, flat stop in the tensor, the part of `out`, strides of its elements in the tensor).
    """
    sizes, strides = box.sizes, contiguous_strides(info.shape, 1)
    start, stop = flat_span(info.shape, box)
    if stop - start == math.prod(sizes):  # flat-contiguous: rows need not be kept apart
        out, sizes, strides = out.view(-1), (box.numel,), (1,)
    rows = max(1, chunk_numel(out.device, CHUNK_NUMEL) // strides[0])
    reach = sum((n - 1) * s for n, s in zip(sizes[1:], strides[1:], strict=True))
    for row in range(0, sizes[0], rows):
        part = out.narrow(0, row, min(rows, sizes[0] - row))
        low = start + row * strides[0]
        yield low, low + (part.shape[0] - 1) * strides[0] + reach + 1, part, strides
