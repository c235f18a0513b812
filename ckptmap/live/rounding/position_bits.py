"""Random bits by position, and stochastic rounding with them.

    (seed, step, FQN)  ->  key = (k0, k1), 32 bits each       by BLAKE2b, on the host
    (key, position)    ->  word = L(L(lo ^ k0) ^ L(hi ^ k1))  by 32-bit arithmetic, on the device

A position is the number of an element in the whole tensor, row by row: `lo` and `hi` are its two
32-bit words. L is `lowbias32`, the 32-bit finalizer of Chris Wellons' hash-prospector. Nothing else
enters: no generator, no rank, no shape of a shard. So every rank, and every way to cut the tensor,
gives an element the same bits.

Integers are int32 and wrap around; a logical shift is an arithmetic one with a mask. torch, inductor and
CUDA agree on these, bit for bit.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

VERSION = 1
"""Of the formula; checkpoints record it."""
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
"""The multipliers of lowbias32, as int32."""
HIGH_HALF, LOW_HALF = -0x10000, 0xFFFF
PIECE = 1 << 16
"""Elements that are rounded at once where nothing is compiled: a few int32 of them fit into a cache."""


class BitsKey(NamedTuple):
    """What one parameter draws its bits from in one step: `first` is k0, `second` is k1, and
    `of_first_words` is L(k1), which stands for L(hi ^ k1) in the first 2^32 elements."""

    first: int
    second: int
    of_first_words: int

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the three words as int32 of shape () on the CPU, which kernels of any device take."""
        import torch

        return torch.tensor(self, dtype=torch.int32, device="cpu").unbind()


def key_of(seed: int, step: int, fqn: str) -> BitsKey:
    """Return the key of a parameter in a step, which counts from 1."""
    text = f"ckptmap rounding {VERSION}|{seed}|{step}|{fqn}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    first, second = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4))
    return BitsKey(signed(first), signed(second), signed(_mixed_number(second)))


def signed(word: int) -> int:
    """Return the int32 that has the low 32 bits of an integer."""
    return ((word + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def _mixed_number(word: int) -> int:
    """Return L of one word, as a number from 0 to 2^32 - 1."""
    word ^= word >> 16
    word = word * (FIRST & 0xFFFFFFFF) & 0xFFFFFFFF
    word ^= word >> 15
    word = word * (SECOND & 0xFFFFFFFF) & 0xFFFFFFFF
    return word ^ word >> 16


def mix_(words: torch.Tensor) -> torch.Tensor:
    """Replace int32 words by L of each, in place."""
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= FIRST
    words ^= (words >> 15).bitwise_and_(0x1FFFF)
    words *= SECOND
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words


def words_at(rows: torch.Tensor, width: int, key: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the words of runs of elements: int32 [len(rows), width].

    rows   the position of the first element of each run: int64; or int32, its low word, for a
           tensor of at most 2^32 elements, whose high words are 0
    width  elements of a run
    key    `BitsKey.tensors()`
    """
    import torch

    first, second, of_first_words = key
    inside = torch.arange(width, dtype=rows.dtype, device=rows.device)
    at = rows.unsqueeze(1) + inside
    if rows.dtype == torch.int32:
        return mix_(mix_(at ^ first) ^ of_first_words)
    low = ((at + (1 << 31)).bitwise_and_(0xFFFFFFFF) - (1 << 31)).to(torch.int32)
    high = (at >> 32).to(torch.int32)
    return mix_(mix_(low ^ first) ^ mix_(high ^ second))


def round_at(
    values: torch.Tensor, rows: torch.Tensor, width: int, key: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return float32 values, which lie at the positions of `words_at`, rounded to bfloat16.

    On a CPU that runs operation by operation, in pieces that stay in its cache; the bits are the same.
    """
    import torch

    if torch.compiler.is_compiling() or values.device.type != "cpu" or values.numel() <= PIECE:
        return rounded(values, words_at(rows, width, key))
    out = torch.empty_like(values, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    source, target = (tensor.view(len(rows), width) for tensor in (values.contiguous(), out))
    length = min(width, PIECE)
    height = PIECE // length
    for row in range(0, len(rows), height):
        for at in range(0, width, length):
            piece = (slice(row, row + height), slice(at, min(at + length, width)))
            words = words_at(rows[piece[0]] + at, piece[1].stop - at, key)
            target[piece] = rounded(source[piece], words)
    return out


def rounded(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return float32 values rounded to bfloat16: away from zero with the probability that the cut-off
    part is of the gap, exactly in steps of 2^-16. NaN stays NaN, infinity infinity.

    words  int32, one for each value, in row-major order; the low 16 bits are used
    """
    import torch

    low = (words & LOW_HALF).view(values.shape)
    bits = (values.view(torch.int32) + low).bitwise_and_(HIGH_HALF)
    near = bits.view(torch.float32).to(torch.bfloat16)
    is_number = values == values  # kernels of `isnan` are not vectorized
    return torch.where(is_number, near, values.to(torch.bfloat16))
