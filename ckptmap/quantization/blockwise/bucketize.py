"""A fast `torch.bucketize` for codes: count the float32 thresholds at or below each quotient.

    quotients [n] f32 within -1 .. 1, thresholds [m] ascending, codes [m + 1] u8  ->  [n] u8

On a CPU a table answers most quotients exactly and the rest are compared with the thresholds. A GPU
compares every quotient: finding the rest would wait for the device. A NaN, which is 0/0, counts as 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.chunks import sent

if TYPE_CHECKING:
    import torch

_SHIFT = 384.0
"""Floats between 2^8 and 2^9 are 2^-15 apart; the middle leaves room for both signs."""
_PLACES = 1 << 17
"""Multiples of 2^-15 from -2 to 2, twice the range of quotients; negative ones in the upper half."""
_WORD = 8
_MARK = 0x80
_MARKS = int.from_bytes(bytes([_MARK] * _WORD), "little", signed=True)


class Bucketizer:
    """Bucketize with few thresholds that are far apart; threads may share one.

    Adding a number whose floats are 2^-15 apart rounds a quotient to a multiple of 2^-15; the low bits of
    the sum are its index in the table. Only at the m indices that a threshold falls on is the table
    undecided. These hold a mark, and are then searched as words of 8 codes: ordinary weights have one
    marked word in 400.
    """

    def __init__(self, thresholds: torch.Tensor, codes: torch.Tensor) -> None:
        self._thresholds, self._codes = thresholds, codes
        self._table = _by_place(thresholds, codes) if thresholds.is_cpu else None

    def bucketize(self, quotients: torch.Tensor, spare: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` [n] u8; `spare` [n] is any buffer of 32 bits an element, overwritten."""
        import torch

        if self._table is None:
            compare(quotients, self._thresholds, self._codes, out)
            return
        places = torch.add(quotients, _SHIFT, out=spare.view(torch.float32)).view(torch.int32)
        torch.index_select(self._table, 0, places.bitwise_and_(_PLACES - 1), out=out)
        whole = out.numel() - out.numel() % _WORD
        if whole:
            self._settle(quotients.narrow(0, 0, whole), out.narrow(0, 0, whole))
        if whole < out.numel():
            compare(quotients[whole:], self._thresholds, self._codes, out[whole:])

    def _settle(self, quotients: torch.Tensor, out: torch.Tensor) -> None:
        """Compare the quotients of words that hold a mark."""
        import torch

        marked = out.view(torch.int64).bitwise_and(_MARKS).nonzero().flatten()
        if marked.numel():
            near = quotients.view(-1, _WORD).index_select(0, marked)
            settled = out.new_empty(near.numel())
            compare(near.view(-1), self._thresholds, self._codes, settled)
            out.view(-1, _WORD).index_copy_(0, marked, settled.view(-1, _WORD))


class FineBucketizer:
    """Bucketize with many thresholds that grow denser towards zero, no two with equal upper 16 bits.

    The upper 16 bits of a quotient give the number of thresholds below all such quotients and the next
    threshold, with which the quotient is compared. `limit` is the float before that threshold: the sign
    of a difference takes a third of the time of a comparison, which torch does not vectorize.
    """

    def __init__(self, thresholds: torch.Tensor) -> None:
        import torch

        self._thresholds = thresholds
        codes = torch.arange(thresholds.numel() + 1, dtype=torch.uint8, device="cpu")
        self._codes = sent(codes, thresholds.device)
        self._tables = _by_bits(thresholds) if thresholds.is_cpu else None

    def bucketize(self, quotients: torch.Tensor, spare: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` [n] u8 as `Bucketizer.bucketize` does; the quotients are overwritten."""
        import torch

        if self._tables is None:
            compare(quotients, self._thresholds, self._codes, out)
            return
        counts, limits = self._tables
        upper = spare.view(torch.int32)
        torch.bitwise_right_shift(quotients.view(torch.int32), 16, out=upper)
        torch.index_select(counts, 0, upper.bitwise_and_(0xFFFF), out=out)
        limit = torch.index_select(limits, 0, upper)
        above = (
            torch.sub(limit, quotients, out=quotients).view(torch.int32).bitwise_right_shift_(31)
        )
        out.sub_(above.to(torch.uint8))  # -1 where it is above: modulo 256, minus 255 is plus 1


def compare(
    quotients: torch.Tensor, thresholds: torch.Tensor, codes: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill `out` by a binary search over all thresholds."""
    import torch

    known = quotients.nan_to_num(0.0)
    bucket = torch.bucketize(known, thresholds, out_int32=True, right=True)
    torch.index_select(codes, 0, bucket, out=out)


def _by_place(thresholds: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the code of each table index, u8 [places], or the mark where a threshold falls on it."""
    import torch

    half = _PLACES // 2
    places = torch.arange(_PLACES, dtype=torch.int32, device="cpu")
    signed = places.add_(half).bitwise_and_(_PLACES - 1).sub_(half)  # 0 .. half - 1, -half .. -1
    zero = torch.tensor(_SHIFT, device="cpu").view(torch.int32)
    at = thresholds.add(_SHIFT).view(torch.int32) - zero
    table = codes.index_select(0, torch.searchsorted(at, signed, out_int32=True))
    return table.masked_fill_(torch.isin(signed, at), _MARK)


def _by_bits(thresholds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return counts u8 [65536] and limits f32 [65536] by the upper 16 bits of a quotient.

    Return None where two thresholds share these bits.
    """
    import torch

    bits = thresholds.view(torch.int32) >> 16
    if not bool(bits.diff().all()):
        return None
    upper = torch.arange(65536, dtype=torch.int32, device="cpu") << 16
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32)
    least = ends.amin(0)  # NaN where one is: no number, compared as 0
    nan = ends.isnan().any(0)
    counts = torch.bucketize(least.masked_fill(nan, 0.0), thresholds, right=True)
    before = thresholds.nextafter(torch.full_like(thresholds, -torch.inf))
    above = torch.cat([before, before.new_full((1,), torch.inf)]).index_select(0, counts)
    return counts.to(torch.uint8), above.masked_fill_(nan, torch.inf)
