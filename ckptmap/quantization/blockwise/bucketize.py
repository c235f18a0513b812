"""Codes by thresholds: how many of some float32 thresholds lie at or below each of many quotients.

    quotients [n] f32 within -1 .. 1, thresholds [m] ascending, codes [m + 1] u8  ->  [n] u8

Most are told by a table, exactly; the rest are compared. A NaN, which is 0/0, counts as 0. A GPU,
which would have to be waited for to find the rest, compares everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SHIFT = 384.0
"""Between 2^8 and 2^9 steps are 2^-15; the middle leaves room for both signs."""
_PLACES = 1 << 17
"""Multiples of 2^-15 from -2 to 2, twice what a quotient may be; negative ones in the upper half."""
_WORD = 8
_MARK = 0x80
_MARKS = int.from_bytes(bytes([_MARK] * _WORD), "little", signed=True)


class Bucketizer:
    """Few thresholds, far apart. Holds the table; shared by any number of threads.

    A quotient is rounded to a multiple of 2^-15, by adding a number whose own steps are that large;
    the low bits of the sum are its place in the table. Only the m places that a threshold falls on
    cannot tell; they are marked, and found again as words of 8 codes, of which ordinary weights
    have one in 400.
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
        """Compare the words that hold a mark."""
        import torch

        marked = out.view(torch.int64).bitwise_and(_MARKS).nonzero().flatten()
        if marked.numel():
            near = quotients.view(-1, _WORD).index_select(0, marked)
            found = out.new_empty(near.numel())
            compare(near.view(-1), self._thresholds, self._codes, found)
            out.view(-1, _WORD).index_copy_(0, marked, found.view(-1, _WORD))


class FineBucketizer:
    """Many thresholds, closer and closer towards zero, no two within the same upper 16 bits.

    Those bits tell how many lie below all quotients that have them, and the next one, which each
    is compared with. `limit` is the float before that: the sign of a difference takes a third of
    the time of a comparison, which torch does not vectorise.
    """

    def __init__(self, thresholds: torch.Tensor) -> None:
        import torch

        self._thresholds = thresholds
        self._codes = torch.arange(
            thresholds.numel() + 1, dtype=torch.uint8, device=thresholds.device
        )
        self._tables = _by_bits(thresholds) if thresholds.is_cpu else None

    def bucketize(self, quotients: torch.Tensor, spare: torch.Tensor, out: torch.Tensor) -> None:
        """As `Counter.count`; the quotients are overwritten."""
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
    """Each with all thresholds, by halving."""
    import torch

    known = quotients.nan_to_num(0.0)
    found = torch.bucketize(known, thresholds, out_int32=True, right=True)
    torch.index_select(codes, 0, found, out=out)


def _by_place(thresholds: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The code of each place, u8 [places], or the mark where a threshold falls on it."""
    import torch

    half = _PLACES // 2
    places = torch.arange(_PLACES, dtype=torch.int32)
    signed = places.add_(half).bitwise_and_(_PLACES - 1).sub_(half)  # 0 .. half - 1, -half .. -1
    zero = torch.tensor(_SHIFT).view(torch.int32)
    at = thresholds.add(_SHIFT).view(torch.int32) - zero
    table = codes.index_select(0, torch.searchsorted(at, signed, out_int32=True))
    return table.masked_fill_(torch.isin(signed, at), _MARK)


def _by_bits(thresholds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Counts u8 [65536] and limits f32 [65536] by the upper 16 bits of a quotient; None: two
    thresholds share them."""
    import torch

    bits = thresholds.view(torch.int32) >> 16
    if not bool(bits.diff().all()):
        return None
    upper = torch.arange(65536, dtype=torch.int32) << 16
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32)
    least = ends.amin(0)  # NaN where one is: no number, compared as 0
    nan = ends.isnan().any(0)
    counts = torch.bucketize(least.masked_fill(nan, 0.0), thresholds, right=True)
    before = thresholds.nextafter(torch.full_like(thresholds, -torch.inf))
    above = torch.cat([before, before.new_full((1,), torch.inf)]).index_select(0, counts)
    return counts.to(torch.uint8), above.masked_fill_(nan, torch.inf)
