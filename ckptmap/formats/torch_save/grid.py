"""The sizes and strides of a view of a storage, as a pickle states them, checked."""

from __future__ import annotations

from collections.abc import Iterable
from pickle import UnpicklingError
from typing import Any, NamedTuple

from ckptmap.tensors import ITEMSIZE, Region, TensorInfo

MAX_NUMEL = 2**63 - 1
"""torch counts elements in 63 bits."""


def exceeds(size: Iterable[int]) -> bool:
    """Return whether torch refuses these sizes: their product is 2**63 or more. A dim of size 0 does
    not make good for the others."""
    numel = 1
    for n in size:
        numel *= n or 1
    return numel > MAX_NUMEL


class Grid(NamedTuple):
    """The sizes and strides of a view, checked once for the many tensors that share them.

    steps   strides in bytes
    reach   elements of the storage from the first one of the tensor to the last one
    end     the same in bytes
    """

    info: TensorInfo
    steps: tuple[int, ...]
    reach: int
    nbytes: int
    is_contiguous: bool
    end: int

    @classmethod
    def make(cls, dtype: str, size: Any, stride: Any) -> Grid:
        """Return the grid. Raise UnpicklingError for sizes or strides that are no integers >= 0, or
        that torch cannot hold."""
        if len(size) != len(stride) or not {*map(type, (*size, *stride))} <= {int}:
            raise UnpicklingError(f"malformed sizes {size!r:.60} or strides {stride!r:.60}")
        if min((*size, *stride), default=0) < 0:
            raise UnpicklingError(f"negative size or stride in {size!r:.60}, {stride!r:.60}")
        if exceeds(size) or max(stride, default=0) > MAX_NUMEL:
            raise UnpicklingError(f"sizes {size!r:.60} or strides {stride!r:.60} exceed 63 bits")
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        steps = tuple([s * ITEMSIZE[dtype] for s in stride])
        info = TensorInfo(tuple(size), dtype)
        dense = Region("", 0, info.shape, steps, info.itemsize).is_contiguous
        reach = 0 if 0 in size else reach
        return cls(info, steps, reach, info.nbytes, dense, reach * info.itemsize)
