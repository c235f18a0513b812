"""Unpack codes in stripes: a word holds one code of each stripe of rows, as HQQ and quanto pack them.

    codes [rows, width] u8  ->  words [step, width]           step = ceil(rows / codes of a word)

    words[r] = codes[r], codes[r + step], codes[r + 2 * step], ...

HQQ puts the first stripe into the high bits (`BitPack`, hqq 0.2), quanto into the low ones (`pack_weights`,
optimum-quanto 0.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Stripes:
    """How codes lie in words.

    bits           bits of a code
    count          codes of a word
    first_is_high  whether the first stripe has the high bits
    """

    bits: int
    count: int
    first_is_high: bool

    def step(self, rows: int) -> int:
        """Return the number of rows of words, which is that of a stripe."""
        return -(-rows // self.count)

    def touched(self, rows: int, low: int, high: int) -> tuple[int, int]:
        """Return the rows of words that hold rows `low` to `high` of the codes: all, if two stripes do."""
        step = self.step(rows)
        if low >= high:
            return 0, 0
        if low // step == (high - 1) // step:
            return low % step, (high - 1) % step + 1
        return 0, step

    def unpack(self, words: torch.Tensor, rows: int, low: int, high: int) -> torch.Tensor:
        """Return rows `low` to `high` of the codes, u8; `words` are the rows that `touched` returns."""
        import torch

        step, (first, _) = self.step(rows), self.touched(rows, low, high)
        codes = torch.empty(high - low, words.shape[1], dtype=torch.uint8, device=words.device)
        for stripe, start, end in self._runs(step, low, high):
            shift = self.bits * (self.count - 1 - stripe if self.first_is_high else stripe)
            held = words[start % step - first : (end - 1) % step + 1 - first]
            codes[start - low : end - low] = (held >> shift) & ((1 << self.bits) - 1)
        return codes

    def _runs(self, step: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield (stripe, its first row of the codes, the one after its last)."""
        for stripe in range(low // step, -(-high // step)):
            yield stripe, max(low, stripe * step), min(high, (stripe + 1) * step)
