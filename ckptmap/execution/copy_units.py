"""The units of work of copying: which slots of an output file are read and written together.

A slot is the place of one chunk of a tensor in the file. Small neighbours go as one span, in one read
and one write; large slots go through one stream, buffer by buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptmap.execution.copy import MAX_GAP
from ckptmap.planning.file_plan import FilePlan

SMALL = 1 << 20
"""A slot of more bytes than this is a unit of its own."""
FEW = 16
"""At most so many small slots join a stream of large ones, where each is read and summed alone."""


def spans(item: FilePlan, limit: int, mine: range) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of slots that are copied together: one large slot, or neighbours that span
    at most `limit` bytes."""
    first: int | None = None
    begin = end = 0  # bytes, of the first slot's start and the last one's end
    small, offsets, sizes = min(SMALL, limit), item.slots.offsets, item.slots.sizes
    for index in mine:
        offset, nbytes, copied = offsets[index], sizes[index], item.origins.is_copied(index)
        if first is not None and (
            not copied
            or nbytes > small
            or offset + nbytes - begin > limit
            or offset - end > MAX_GAP
        ):
            yield first, index
            first = None
        if copied and nbytes > small:
            yield index, index + 1
        elif copied and first is None:
            first, begin = index, offset
        end = offset + nbytes
    if first is not None:
        yield first, mine.stop


def streams(
    item: FilePlan, cut: Iterable[tuple[int, int]], small: int, limit: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield (first, stop, is it a stream?) of `cut`, joined: a large slot forms a stream with the
    large slots, and the few small ones, that follow it without a gap, up to `limit` bytes."""
    slots, held = item.slots, (0, 0, False)
    for first, stop in cut:
        large = slots[first].nbytes > small
        begin, end = slots[held[0]].offset, slots[held[1] - 1].offset + slots[held[1] - 1].nbytes
        nbytes = slots[stop - 1].offset + slots[stop - 1].nbytes - begin
        follows = held[1] == first and end == slots[first].offset and nbytes <= limit
        few = (large or stop - first <= FEW) and (held[2] or held[1] - held[0] <= FEW)
        if follows and few and (large or held[2]):
            held = held[0], stop, True
            continue
        if held[1]:
            yield held
        held = first, stop, large
    if held[1]:
        yield held
