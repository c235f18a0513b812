"""Digest the bytes of an output file that belong to no tensor: headers, zip directories, padding.

The manifest has a digest of every chunk of a tensor, and one of all other bytes of each file. So a
flipped bit is noticed wherever it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add, gt
from typing import Protocol

BLOCK_NBYTES = 1 << 20
NEAR_NBYTES = 16 << 10
"""Gaps that are no farther apart on average are read a block at a time: a read for each would cost
more than the tensors between them."""


class Reader(Protocol):
    """Reads bytes of files, as `Files` does."""

    def read(self, file: str, offset: int, nbytes: int) -> bytes: ...


def digest_around(
    files: Reader, file: str, nbytes: int, offsets: Sequence[int], sizes: Sequence[int]
) -> str:
    """Return the xxh3 (64 bits, hex) of the bytes of `file` that lie in none of the spans.

    Span i has `sizes[i]` bytes from byte `offsets[i]` on; spans may overlap, in any order. `nbytes`
    is the size of the file. Large spans are not read. Raises what `files.read` raises.
    """
    from xxhash import xxh3_64

    digest = xxh3_64()
    for piece in _pieces(files, file, *_gaps(nbytes, offsets, sizes)):
        digest.update(piece)
    return digest.hexdigest()


def _gaps(nbytes: int, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the starts and the stops of the runs of bytes outside the spans; runs may be empty."""
    if any(map(gt, offsets, offsets[1:])):
        spans = sorted(zip(offsets, sizes, strict=True))
        offsets, sizes = [span[0] for span in spans], [span[1] for span in spans]
    starts = [0, *accumulate(map(add, offsets, sizes), max)]
    stops = list(map(max, starts, [*offsets, nbytes]))
    if starts[-1] > nbytes:  # a manifest may state any span: nothing is read past the end
        starts, stops = [min(at, nbytes) for at in starts], [min(at, nbytes) for at in stops]
    return starts, stops


def _pieces(
    files: Reader, file: str, starts: Sequence[int], stops: Sequence[int]
) -> Iterator[bytes]:
    """Yield the bytes of these gaps in order."""
    at = 0
    while at < len(starts):
        base = starts[at]
        end = bisect_right(stops, base + BLOCK_NBYTES, at)
        if end - at > 1 and stops[end - 1] - base <= NEAR_NBYTES * (end - at):
            block = files.read(file, base, stops[end - 1] - base)
            gaps = zip(starts[at:end], stops[at:end], strict=True)
            yield b"".join([block[start - base : stop - base] for start, stop in gaps])
            at = end
            continue
        for offset in range(base, stops[at], BLOCK_NBYTES):
            yield files.read(file, offset, min(BLOCK_NBYTES, stops[at] - offset))
        at += 1
