"""The arithmetic of torchao's NF4: absmax and codes of blocks, 8-bit scalers of the absmax, and decoding.

    w [n] T -> absmax [n/block] T, codes [n/2] u8        T: bfloat16, float16 or float32
    absmax [n/block] T -> scalers [n/block] i8, factor [n/block/scaler_block] T, mean [] T
    w'[i] = table[code[i]] * (scalers[b] / factor[b // scaler_block] + mean)      b = i // block

Bit-equal to `to_nf4` and `NF4Tensor.get_original_weight` of torchao 0.18
(torchao/quantization/quantize_/workflows/nf4/nf4_tensor.py), which compute everything in T. There is one
departure: an all-zero block is 0/0 there and gets the lowest code; here it gets the code of 0.

The code of an element depends on the quotient w/absmax alone. For a 16-bit T it comes from a table of
65536 entries by the quotient's bits, for float32 from thresholds (see `bucketize`). Work goes in chunks
that stay in a CPU's cache, on a device in larger ones (see `chunks`). Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.core.devices import indexed
from ckptmap.quantization.blockwise.bucketize import Bucketizer
from ckptmap.quantization.blockwise.chunks import chunk_numel, sent
from ckptmap.quantization.blockwise.fourbit import pack, pairs

if TYPE_CHECKING:
    import torch

CHUNK_NUMEL = 512 * 1024
"""Most elements per chunk on a CPU: fewer cost more calls, more leave the cache."""

# torchao's table: the quantiles of a normal distribution (QLoRA, arXiv:2305.14314, appendix E),
# written there with four decimals and then rounded to T.
TABLE = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
ZERO_CODE = TABLE.index(0.0)

_lookups: dict[tuple[torch.dtype, str], torch.Tensor | Bucketizer] = {}


def value_table(dtype: torch.dtype) -> torch.Tensor:
    """Return the 16 values in T."""
    import torch

    return torch.tensor(TABLE, dtype=dtype, device="cpu")


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Return codes by torchao's rule: the first index of the least |value - table|, rounded to T.

    Along the table the distance falls, then rises, and no two neighbours are so close that a fall
    is rounded away: so the index is the number of falls.
    """
    distance = (values.unsqueeze(-1) - value_table(values.dtype)).abs()
    return (distance.diff(dim=-1) < 0).sum(-1)


# ------------------------------------------------------------------------------- encoding


def lookup(dtype: torch.dtype, device: str) -> torch.Tensor | Bucketizer:
    """Return what maps quotients to codes: a table [65536] u8 by 16 bits, for float32 a Bucketizer.

    A NaN, which is 0/0, has the code of 0. The CPU computes it for every device.
    """
    import torch

    device = indexed(device)
    table = _lookups.get((dtype, device))
    if table is None:
        if dtype.itemsize == 4:
            made = sent(torch.arange(16, dtype=torch.uint8, device="cpu"), device)
            table = Bucketizer(sent(_thresholds(), device), made)
        else:
            table = made = sent(_lookup_16(dtype), device)
        if type(made) is torch.Tensor:  # a fake one must not outlive its mode
            _lookups[dtype, device] = table
    return table


def _lookup_16(dtype: torch.dtype) -> torch.Tensor:
    """Return the code of every 16-bit pattern, in the order of its unsigned value."""
    import torch

    values = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
    codes = nearest(values)
    return torch.where(values.isnan(), ZERO_CODE, codes).to(torch.uint8)


def _thresholds() -> torch.Tensor:
    """Return the least float32 of each code 1 to 15.

    Both differences are monotone in the value, so there is one, a few ulp from the midpoint of two
    neighbours.
    """
    import torch

    table = value_table(torch.float32)
    lower, upper = table.narrow(0, 0, 15).double(), table.narrow(0, 1, 15).double()
    middle = ((lower + upper) / 2).float().view(torch.int32)
    around = torch.arange(-128, 129, dtype=torch.int32, device="cpu")
    values = (middle.unsqueeze(-1) + around).view(torch.float32)  # [15, 257], none crosses 0
    values = values.sort(dim=-1).values
    below = nearest(values) <= torch.arange(15, device="cpu").unsqueeze(-1)
    return values.gather(1, below.sum(-1, keepdim=True)).squeeze(1)


class NF4Quantizer:
    """Computes codes and absmax of blocks, in chunks, with reused buffers."""

    def __init__(self, numel: int, block: int, dtype: torch.dtype, device: str) -> None:
        import torch

        self._block = block
        self._chunk = min(numel, max(chunk_numel(device, CHUNK_NUMEL) // block, 1) * block)
        self._lookup = lookup(dtype, device)
        self._integer = torch.int32 if dtype.itemsize == 4 else torch.int16
        self._spare = torch.empty(self._chunk, dtype=torch.int32, device=device)
        self._quotient = torch.empty(self._chunk, dtype=dtype, device=device)
        self._code = torch.empty(self._chunk, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """The size of the buffers."""
        buffers = (self._spare, self._quotient, self._code)
        return sum(b.numel() * b.element_size() for b in buffers)

    def run(self, values: torch.Tensor, absmax: torch.Tensor, packed: torch.Tensor) -> None:
        """Quantize values [m] T -> absmax [m/block] T, packed [m/2] u8, the first of two in the high nibble.

        m is a multiple of the block.
        """
        for start in range(0, values.numel(), self._chunk):
            n = min(self._chunk, values.numel() - start)
            self._run_chunk(
                values.narrow(0, start, n),
                absmax.narrow(0, start // self._block, n // self._block),
                packed.narrow(0, start // 2, n // 2),
            )

    def _run_chunk(self, values: torch.Tensor, absmax: torch.Tensor, packed: torch.Tensor) -> None:
        import torch

        n = values.numel()
        # Without their sign, floats order as the integers of their bits, NaN above infinity:
        # the maximum of integers is 5 times faster than that of 16-bit floats.
        magnitude = self._spare.view(self._integer).narrow(0, 0, n)
        mask = torch.iinfo(self._integer).max
        torch.bitwise_and(values.view(self._integer), mask, out=magnitude)
        torch.amax(magnitude.view(-1, self._block), 1, out=absmax.view(self._integer))
        quotient = self._quotient.narrow(0, 0, n)
        blocks = (-1, self._block)
        torch.div(values.view(blocks), absmax.unsqueeze(-1), out=quotient.view(blocks))
        pack(self._nearest(quotient), self._spare.narrow(0, 0, n), packed)

    def _nearest(self, quotient: torch.Tensor) -> torch.Tensor:
        import torch

        n = quotient.numel()
        code, spare = self._code.narrow(0, 0, n), self._spare.narrow(0, 0, n)
        if isinstance(self._lookup, Bucketizer):
            self._lookup.bucketize(quotient, spare, code)
            return code
        if spare.is_cpu:  # one buffer: what a thread frees at once goes back to the system
            spare.copy_(quotient.view(torch.uint16))
        else:
            spare = quotient.view(torch.uint16).to(torch.int32)
        return torch.index_select(self._lookup, 0, spare, out=code)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """View floats as signed integers of their width: positive ones keep their order."""
    import torch

    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, by a maximum of bits: several times faster than `isfinite`."""
    import torch

    infinity = _bits(torch.tensor(torch.inf, dtype=values.dtype))
    mask = torch.iinfo(infinity.dtype).max
    return not values.numel() or bool(_bits(values).bitwise_and(mask).amax() < infinity)


def is_positive(values: torch.Tensor) -> bool:
    """Return whether all values are finite and above zero."""
    return is_finite(values) and (not values.numel() or bool(_bits(values).amin() > 0))


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return `values.abs().amax(1)`; as integers it is 5 times faster for 16-bit floats."""
    import torch

    bits = _bits(values)
    return bits.bitwise_and(torch.iinfo(bits.dtype).max).amax(1).view(values.dtype)


def quantize_scalers(
    absmax: torch.Tensor, mean: torch.Tensor, scaler_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize absmax [m] T -> scalers [m] i8, factor [m/scaler_block] T.

    m is a multiple of the scaler block; any split at such a multiple gives the same bits.
    """
    import torch

    centred = (absmax - mean).view(-1, scaler_block)
    factor = 256 / (2 * _largest(centred))
    scalers = centred.mul_(factor.unsqueeze(-1)).round_().clamp_(-128, 127)
    return scalers.flatten().to(torch.int8), factor


# ------------------------------------------------------------------------------- decoding


def scales(
    scalers: torch.Tensor, factor: torch.Tensor, mean: torch.Tensor, scaler_block: int, first: int
) -> torch.Tensor:
    """Dequantize scalers [m] i8 -> the scale of each block [m] T.

    The first scaler is number `first` within the first factor's scaler block.
    """
    import torch

    if not first and scalers.numel() == factor.numel() * scaler_block:
        blocks = scalers.view(-1, scaler_block)
        return (blocks / factor.unsqueeze(-1)).to(mean.dtype).flatten() + mean
    index = torch.arange(first, first + scalers.numel(), device=scalers.device)
    return (scalers / factor.index_select(0, index // scaler_block)).to(mean.dtype) + mean


class NF4Dequantizer:
    """Decodes blocks, at most `numel` elements per call, into a reused buffer or a given one."""

    def __init__(self, numel: int, table: torch.Tensor) -> None:
        import torch

        self._pairs = pairs(table)
        self._values = table.new_empty(numel)
        self._index = table.new_empty(-(-numel // 2), dtype=torch.int32)

    def run(
        self, packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Dequantize packed [m/2] u8, scale [m/block] T -> values [m] T.

        They are in `out` where it is given, which must begin at an even element; else they are valid
        until the next call.
        """
        import torch

        index = self._index.narrow(0, 0, packed.numel()).copy_(packed)
        values = self._values.narrow(0, 0, 2 * packed.numel()) if out is None else out
        torch.index_select(self._pairs, 0, index, out=values.view(self._pairs.dtype))
        values.view(scale.numel(), -1).mul_(scale.unsqueeze(-1))
        return values
