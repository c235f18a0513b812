"""The dims of a strided copy, merged where both sides allow it, and the run of elements that a box spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptmap.tensors import Box, contiguous_strides


@dataclass(frozen=True, slots=True)
class Dim:
    """`n` steps of `src` bytes in the file and `dst` bytes in the output."""

    n: int
    src: int
    dst: int


Dims: TypeAlias = tuple[Dim, ...]


def merge_dims(sizes: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> Dims:
    """Return the fewest dims that visit the same elements in the same order.

    [4, 8], contiguous on both sides -> [32]. Dims of size 1 go.
    """
    dims: list[Dim] = []
    for n, s, d in zip(sizes, src, dst, strict=True):
        if n == 1:
            continue
        if dims and dims[-1].src == s * n and dims[-1].dst == d * n:
            dims[-1] = Dim(dims[-1].n * n, s, d)
        else:
            dims.append(Dim(n, s, d))
    return tuple(dims)


def flat_span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Return the flat positions of a box's first element and of the one after its last."""
    strides = contiguous_strides(shape, 1)
    start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    if box.numel == 0:
        return start, start
    reach = sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
    return start, start + reach + 1
