"""Prove from boxes alone that chunks hold every element of a tensor exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from ckptmap.tensors import Box


def prove_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return None if the boxes hold every element of `shape` exactly once, else a clause with the
    fault.

    They do if all lie inside the shape, no two overlap, and their volumes add up to the shape's.
    """
    if len(boxes) == 1 and boxes[0] == Box.whole(shape) and min(shape, default=0) >= 0:
        return None  # the one chunk of nearly every tensor
    return _fault(tuple(shape), tuple(boxes))


@lru_cache(maxsize=64)
def prove_rows(shape: tuple[int, ...], bounds: tuple[int, ...]) -> str | None:
    """Return the same as `prove_tiling` for chunks of whole rows.

    Chunk i holds the rows from `bounds[i]` to `bounds[i + 1]`.
    """
    for start, stop in pairwise(bounds):
        if stop <= start:
            return f"a chunk of rows {start} to {stop}"
    if (bounds[0], bounds[-1]) != (0, shape[0]):
        return f"chunks cover rows {bounds[0]} to {bounds[-1]} of {shape[0]}"
    return None


@lru_cache(maxsize=64)
def _fault(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> str | None:
    """Return the fault or None; cached, because many tensors have one shape and cut."""
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.offsets) != len(shape) or any(
            o < 0 or n < 0 or o + n > limit
            for o, n, limit in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            return f"chunk {_text(box)} leaves the shape {list(shape)}"
    filled = [box for box in boxes if box.numel]
    overlap = _first_overlap(filled, len(shape))
    if overlap is not None:
        return f"chunks {_text(overlap[0])} and {_text(overlap[1])} overlap"
    total = sum(box.numel for box in filled)
    if total != whole.numel:
        return f"chunks cover {total} of {whole.numel} elements"
    return None


def _first_overlap(boxes: Sequence[Box], ndim: int) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, or None.

    It sweeps along the dim with the most cuts, where the fewest boxes are open at a time.
    """
    if len(boxes) < 2:
        return None
    if ndim == 0:
        return boxes[0], boxes[1]
    dim = max(range(ndim), key=lambda d: len({box.offsets[d] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        start = box.offsets[dim]
        open_boxes = [b for b in open_boxes if b.offsets[dim] + b.sizes[dim] > start]
        for other in open_boxes:
            if box.intersect(other) is not None:
                return other, box
        open_boxes.append(box)
    return None


def _text(box: Box) -> str:
    return f"{list(box.offsets)}+{list(box.sizes)}"
