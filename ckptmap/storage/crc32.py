"""CRC-32, as the members of a zip have it: by ISA-L where that is installed, ten times faster."""

from __future__ import annotations

from functools import cache

__all__ = ["crc32", "crc32_combine"]

_POLYNOMIAL = 0xEDB88320

Matrix = tuple[int, ...]
"""Column i: what bit i becomes."""


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two runs of bytes, of which the second has `nbytes`, from those of each.

    What `crc32_combine` of zlib's C library does: the CRC of `a + b` is that of `a` moved on by
    `len(b)` zero bytes, xor that of `b`. Moving on by one bit is a linear map of 32 bits, squared
    again and again for the powers of two.
    """
    power = 3  # a byte is 2**3 bits
    while nbytes:
        if nbytes & 1:
            first = _apply(_zeros(power), first)
        nbytes >>= 1
        power += 1
    return first ^ second


@cache
def _zeros(power: int) -> Matrix:
    """Moves a CRC on by 2**power zero bits."""
    if not power:
        return (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    half = _zeros(power - 1)
    return tuple(_apply(half, column) for column in half)


def _apply(matrix: Matrix, vector: int) -> int:
    result, bit = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[bit]
        vector >>= 1
        bit += 1
    return result


try:
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:  # no wheel for this machine
    from zlib import crc32

    crc32_combine = combined
