"""Integer codes of 1 to 8 bits packed into 32-bit words, the first code in the lowest bits.

    codes i8 [r, n], -2^(bits-1) to 2^(bits-1) - 1  <->  words i32 [r, ceil(n * bits / 32)]

A code q is stored as q + 2^(bits-1). The layout is that of compressed-tensors (compressors/pack_quantized)
along each row, and of AutoGPTQ along each column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptmap.errors import SourceError

if TYPE_CHECKING:
    import torch

WORD = 32
_WIDER = {2: "int16", 4: "int32", 8: "int64"}
"""Codes in a byte -> the integer that has a byte for each."""
_SPREADS = {
    4: ((4, 0x0F0F),),
    2: ((12, 0x000F000F), (6, 0x03030303)),
    1: ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101)),
}
"""Bits -> the steps (shift, mask) that move the codes of a byte apart, half of them at a time."""


class HoldsCodes(Protocol):
    """A way to hold codes along a row: how many words they take, and where they lie."""

    def words(self, count: int) -> int: ...

    def span(self, start: int, count: int) -> tuple[int, int]: ...

    def unpacked(self, words: torch.Tensor, start: int, count: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Packing:
    """How codes are packed into 32-bit words."""

    bits: int
    aligned: bool = False

    @property
    def _whole(self) -> int:
        """Codes per word where no code spans two words."""
        return WORD // self.bits

    def words(self, count: int) -> int:
        """Return the number of words for `count` codes."""
        return -(-count // self._whole) if self.aligned else -(-count * self.bits // WORD)

    def span(self, start: int, count: int) -> tuple[int, int]:
        """Return the first word and the number of words that hold these codes."""
        low = start // self._whole if self.aligned else start * self.bits // WORD
        return low, self.words(start + count) - low

    def unpacked(self, words: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Unpack words i32 [r, n], the first of which holds code `start` -> codes i8 [r, count].

        Raises SourceError CKM115 where bits are set that no code has.
        """
        import torch

        if self.aligned:
            self._require_free_bits_zero(words)
        if self.bits == 8:
            of_bytes = _of_bytes(words).narrow(1, start % 4, count)
            return (of_bytes ^ 0x80).view(torch.int8)
        if WORD % self.bits == 0:
            return self._unpacked_whole(words).narrow(1, start % self._whole, count)
        word, shift = self._places(torch.arange(start, start + count, device=words.device), start)
        low = words.index_select(1, word).to(torch.int64).bitwise_and_(0xFFFFFFFF) >> shift
        spills = shift + self.bits > WORD
        if not self.aligned:
            after = words.index_select(1, (word + spills).clamp_(max=words.shape[1] - 1))
            low |= torch.where(spills, after.to(torch.int64) << (WORD - shift), 0)
        half = 1 << (self.bits - 1)
        return (low.bitwise_and_(2 * half - 1) - half).to(torch.int8)

    def _require_free_bits_zero(self, words: torch.Tensor) -> None:
        """Raise SourceError CKM115 where words of 32 bits hold more than their whole codes.

        Seven bits fill as many words as eight, so only these bits tell a wrong `num_bits`.
        """
        free = WORD - self._whole * self.bits
        if bool((words >> (WORD - free)).any()):
            raise SourceError(
                "CKM115",
                f"weight_packed: its codes have {self.bits} bits, as config.json or the record says,"
                f" but the upper {free} bits of its words, which these leave 0, are set",
                "write the num_bits that it was quantized with into config.json, or save it again",
            )

    def _unpacked_whole(self, words: torch.Tensor) -> torch.Tensor:
        """Unpack all codes of words that hold whole codes: i32 [r, n] -> i8 [r, n * 32 / bits].

        A byte is put into an integer of as many bytes as it holds codes, and its codes are moved apart by
        shifts: no write skips memory, and eight times less is moved than by one word a code.
        """
        import torch

        half = 1 << (self.bits - 1)
        codes = _of_bytes(words).to(getattr(torch, _WIDER[8 // self.bits]))
        for shift, mask in _SPREADS[self.bits]:
            codes = codes.bitwise_or(codes << shift).bitwise_and_(mask)
        return codes.view(torch.int8).sub_(half)

    def _places(self, codes: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the word of each code, relative to that of `start`, and the bit at which the code begins."""
        if self.aligned:
            return codes // self._whole - start // self._whole, codes % self._whole * self.bits
        at = codes * self.bits
        return at // WORD - start * self.bits // WORD, at % WORD


@dataclass(frozen=True)
class PlanePacking:
    """How gptqmodel's planes hold codes: of each 32 codes first the low bits, then the higher ones.

        32 codes of 7 bits -> 4 words of their 4 low bits, 2 words of the next 2, 1 word of the highest

    A plane holds as many bits of a code as divide a word, so that codes of 2, 4 and 8 bits lie as in `Packing`.
    Source: `utils/planar_packing.py` (gptqmodel 7.7).
    """

    bits: int

    @property
    def planes(self) -> Iterator[tuple[int, int]]:
        """Yield (bits of a code in the plane, bits below it), from the lowest plane on."""
        below = 0
        for width in (8, 4, 2, 1):
            if self.bits & width:
                yield width, below
                below += width

    def words(self, count: int) -> int:
        """Return the number of words for `count` codes."""
        return -(-count // WORD) * self.bits

    def span(self, start: int, count: int) -> tuple[int, int]:
        """Return the first word and the number of words that hold these codes."""
        low = start // WORD * self.bits
        return low, self.words(start + count) - low

    def unpacked(self, words: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Unpack words i32 [r, n], the first of which begins the 32 codes of `start` -> codes i8 [r, count]."""
        import torch

        blocks = words.reshape(len(words), -1, self.bits)
        codes = words.new_zeros((len(words), blocks.shape[1], WORD), dtype=torch.uint8)
        at = 0
        for width, below in self.planes:
            plane = blocks[:, :, at : at + width].reshape(len(words), -1)
            signed = Packing(width).unpacked(plane, 0, codes[0].numel())
            unsigned = (signed.to(torch.int16) + (1 << (width - 1))).to(torch.uint8)
            codes |= unsigned.view(codes.shape) << below
            at += width
        wanted = codes.view(len(words), -1).narrow(1, start % WORD, count)
        return (wanted.to(torch.int16) - (1 << (self.bits - 1))).to(torch.int8)

    def packed(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes i8 [r, n], n a multiple of 32, into words i32 [r, n * bits / 32]."""
        import torch

        unsigned = (codes.to(torch.int16) + (1 << (self.bits - 1))).to(torch.uint8)
        words = []
        for width, below in self.planes:
            plane = (unsigned >> below) & ((1 << width) - 1)
            words.append(_packed_bytes(plane, width).view(len(codes), -1, width))
        return torch.cat(words, 2).view(len(codes), -1)


def _of_bytes(words: torch.Tensor) -> torch.Tensor:
    """Return words [r, n] as bytes [r, 4 n]."""
    import torch

    if words.stride(-1) != 1:  # a single column may be contiguous and yet be so
        words = words.clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8)


def packed(codes: torch.Tensor, bits: int, aligned: bool) -> torch.Tensor:
    """Pack codes i8 [r, n] into words i32, the first code in the lowest bits; codes are stored as
    code + 2^(bits-1), and bits without a code are 0.

    aligned  no code spans two words
    """
    import torch

    unsigned = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    if WORD % bits == 0:
        return _packed_bytes(unsigned, bits)
    if aligned:
        return _packed_whole(unsigned, bits)
    count = unsigned.shape[1]
    at = torch.arange(count, device=codes.device) * bits
    low = unsigned.to(torch.int64) << (at % WORD)
    words = low.new_zeros((len(codes), -(-count * bits // WORD) + 1))
    words.index_add_(1, at // WORD, low & 0xFFFFFFFF)
    words.index_add_(1, at // WORD + 1, low >> WORD)
    return words[:, :-1].to(torch.int32).contiguous()


def _packed_bytes(unsigned: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes u8 [r, n], of which a byte holds 1, 2, 4 or 8."""
    import torch

    edge = -unsigned.shape[1] % (WORD // bits)
    if edge:
        unsigned = torch.nn.functional.pad(unsigned, (0, edge))
    parts = unsigned.view(len(unsigned), -1, 8 // bits)
    out = parts[:, :, 0].clone()
    for place in range(1, 8 // bits):
        out |= parts[:, :, place] << (place * bits)
    return out.contiguous().view(torch.int32)


def _packed_whole(unsigned: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes u8 [r, n], as many into a word as fit as a whole."""
    import torch

    whole = WORD // bits
    edge = -unsigned.shape[1] % whole
    wide = torch.nn.functional.pad(unsigned, (0, edge)).to(torch.int64)
    shifts = torch.arange(0, whole * bits, bits, device=unsigned.device)
    return (wide.view(len(wide), -1, whole) << shifts).sum(-1).to(torch.int32)
