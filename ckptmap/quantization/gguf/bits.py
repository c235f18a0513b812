"""Take fields of bits out of blocks of ggml: blocks u8 [n, bytes of a block] -> [n, ...].

Numbers are little-endian. A byte stays u8 as long as it can, because that is a quarter of the memory traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.chunks import constant

if TYPE_CHECKING:
    import torch


def halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the fp16 number at byte `at`, f32 [n, 1]."""
    import torch

    return _copied(blocks, at, 2).view(torch.float16).to(torch.float32)


def words(blocks: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """Return u16 numbers from byte `at` on, i32 [n, count]."""
    import torch

    found = _copied(blocks, at, 2 * count).view(torch.int16)
    return found.to(torch.int32).bitwise_and_(0xFFFF)


def longs(blocks: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """Return u32 numbers from byte `at` on, i64 [n, count]."""
    import torch

    found = _copied(blocks, at, 4 * count).view(torch.int32)
    return found.to(torch.int64).bitwise_and_(0xFFFFFFFF)


def shifted(values: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Return `(values >> shift) & mask` for each shift: [n, ...] -> [n, ..., shifts]."""
    return (values.unsqueeze(-1) >> _shifts(shifts, values)).bitwise_and_(mask)


def spread(values: torch.Tensor, width: int, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Return the fields of runs of `width` bytes, one field of all bytes after the other.

    [n, runs * width] u8 -> [n, runs, shifts, width] u8; `width` is a multiple of 4

    Eight bytes, or four, are computed at once: what is shifted in from a neighbour is masked away.
    """
    import torch

    wide, nbytes = (torch.int64, 8) if width % 8 == 0 else (torch.int32, 4)
    runs = _copied(values, 0, values.shape[1]).view(wide).view(len(values), -1, width // nbytes)
    masks = int.from_bytes(bytes([mask]) * nbytes, "little")
    fields = [(runs >> shift if shift else runs) & masks for shift in shifts]
    return torch.stack(fields, dim=2).view(torch.uint8)


def nibbles(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the low halves of runs of `width` bytes, then the high ones: [n, runs, 2, width]."""
    return spread(values, width, (0, 4), 15)


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of bytes, the lowest first: [n, m] -> [n, m * 8]."""
    return shifted(values, tuple(range(8)), 1).flatten(1)


def signs(values: torch.Tensor) -> torch.Tensor:
    """Return -1 for each bit that is set and 1 for others: [n, m] u8 -> i8 [n, m, 8]."""
    return _rows("gguf signs", lambda byte: byte, values)


def even_signs(values: torch.Tensor) -> torch.Tensor:
    """Return the signs that 7 bits name, of which an even number is negative: [n, m] -> i8 [n, m, 8]."""
    return _rows(
        "gguf even signs", lambda code: code & 127 | (code & 127).bit_count() % 2 << 7, values
    )


def rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows of a table by their number: table [k, w], index [...] -> [..., w]."""
    import torch

    found = table.index_select(0, index.reshape(-1).to(torch.int32))
    return found.view(*index.shape, table.shape[1])


def small_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows of a table of small integers by their number: table i8 [k, w], index [...] -> i8 [..., w].

    A row of 4 or 8 bytes is one number that is looked up, several times as fast as a row of floats.
    """
    import torch

    wide = torch.int64 if table.shape[1] == 8 else torch.int32
    found = table.view(wide).flatten().index_select(0, index.reshape(-1).to(torch.int32))
    return found.view(torch.int8).view(*index.shape, table.shape[1])


def looked_up(name: str, values: tuple[float, ...], codes: torch.Tensor) -> torch.Tensor:
    """Return the value of each code, f32, in the shape of the codes."""
    import torch

    table = constant(("gguf", name), codes.device, lambda: torch.tensor(values, device="cpu"))
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def levels(name: str, values: tuple[float, ...], codes: torch.Tensor) -> torch.Tensor:
    """Return the level of each 4-bit code, f32, in the shape of the codes: u8, contiguous, an even number in a row.

    Two neighbours are looked up at once, which halves the number of look-ups.
    """
    import torch

    def made() -> torch.Tensor:
        single = torch.tensor(values, dtype=torch.float32, device="cpu")
        number = torch.arange(16 << 8, dtype=torch.int32, device="cpu")
        pairs = torch.stack([single[number & 15], single[number >> 8]], dim=1)
        return pairs.view(torch.int64).flatten()  # one element a pair

    table = constant(("gguf pairs", name), codes.device, made)
    pairs = codes.view(torch.int16).to(torch.int32).flatten()
    return table.index_select(0, pairs).view(torch.float32).view(codes.shape)


def _copied(blocks: torch.Tensor, at: int, nbytes: int) -> torch.Tensor:
    """Return a field in memory of its own, where wider numbers are aligned."""
    import torch

    return blocks[:, at : at + nbytes].clone(memory_format=torch.contiguous_format)


def _rows(name: str, byte_of: Callable[[int], int], values: torch.Tensor) -> torch.Tensor:
    import torch

    def made() -> torch.Tensor:
        signs = [[-1 if byte_of(n) >> bit & 1 else 1 for bit in range(8)] for n in range(256)]
        return torch.tensor(signs, dtype=torch.int8, device="cpu")

    return small_rows(constant(name, values.device, made), values)


def _shifts(shifts: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    import torch

    def made() -> torch.Tensor:
        return torch.tensor(shifts, dtype=like.dtype, device="cpu")

    return constant(("gguf shifts", shifts, like.dtype), like.device, made)
