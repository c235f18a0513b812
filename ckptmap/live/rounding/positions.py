"""The positions in the whole tensor of the elements that this rank holds, as runs of one width.

[8, 6] cut by columns, rank 1 of 2  ->  width 3, rows at 3, 9, 15, ..., 45
[8, 6] cut by rows, rank 1 of 2     ->  width 24, one row at 24
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.live.model.live_tensor import cut, is_dtensor
from ckptmap.tensors import Box, contiguous_strides

if TYPE_CHECKING:
    import torch

MAX_WIDTH = 1 << 30
"""Elements of a run: int32 counts them."""
NARROW = 1 << 32
"""Elements of a whole tensor up to which the high words of all positions are 0."""

Boxes = Sequence[tuple[Box, Box]]
"""(box of the whole tensor, the same box in the local one) of what a rank holds."""


@dataclass(frozen=True, eq=False)
class Positions:
    """The runs of a local tensor: `rows` has the position of the first element of each, int32 [n], or
    int64 where the whole tensor has more than 2^32 elements."""

    rows: torch.Tensor
    width: int


def positions(
    shape: Sequence[int], boxes: Boxes, local: Sequence[int], device: torch.device
) -> Positions:
    """Return the positions of a local tensor of shape `local` in the whole one of `shape`.

    Raises LoadError CKM520 for a run of more than 2^30 elements of one dim.
    """
    import torch

    rows, width = runs(shape, boxes, local)
    if math.prod(shape) <= NARROW:
        rows = ((rows + (1 << 31)).bitwise_and_(0xFFFFFFFF) - (1 << 31)).to(torch.int32)
    return Positions(rows.to(device), width)


def runs(shape: Sequence[int], boxes: Boxes, local: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return the first positions of the runs, int64 on the CPU, and their width."""
    import torch

    depth = _depth(shape, [box for box, _ in boxes])
    width = math.prod(local[depth:])
    if width > MAX_WIDTH:
        raise LoadError(
            "CKM520",
            f"a rank holds {width} elements of one row, expected at most {MAX_WIDTH}",
            "cut the tensor over more ranks",
        )
    strides = contiguous_strides(shape, 1)
    starts = torch.zeros(tuple(local[:depth]), dtype=torch.int64, device="cpu")
    for box, place in boxes:
        found = torch.tensor(_start(box, strides), dtype=torch.int64, device="cpu")
        for dim in range(depth):
            steps = torch.arange(box.sizes[dim], dtype=torch.int64, device="cpu") * strides[dim]
            found = found.unsqueeze(-1) + steps
        spans = zip(place.offsets[:depth], place.sizes[:depth], strict=True)
        starts[tuple(slice(at, at + size) for at, size in spans)] = found
    return starts.reshape(-1), width


def _depth(shape: Sequence[int], boxes: Sequence[Box]) -> int:
    """Return the first dim of a run: as many dims as lie in one piece in every box, and no more elements
    than int32 counts."""
    depth = len(shape)
    for dim in reversed(range(len(shape))):
        if math.prod(boxes[0].sizes[dim:]) > MAX_WIDTH and depth < len(shape):
            break
        is_whole = all(box.sizes[dim] == shape[dim] for box in boxes)
        if is_whole or len(boxes) == 1:
            depth = dim
        if not is_whole:
            break
    return depth


def _start(box: Box, strides: Sequence[int]) -> int:
    return sum(at * stride for at, stride in zip(box.offsets, strides, strict=True))


# ------------------------------------------------------------------------------- blocks of moments


def boxes_of(tensor: torch.Tensor) -> Boxes:
    """Return the boxes that this rank holds of a tensor; empty: none."""
    if not is_dtensor(tensor):
        whole = Box.whole(tuple(tensor.shape))
        return [(whole, whole)] if whole.numel else []
    place = tensor.device_mesh.get_coordinate()
    return [] if place is None else _cut(tensor, place)


def every_ranks_boxes(tensor: torch.Tensor) -> Iterator[Boxes]:
    """Yield the boxes of each rank of the tensor's mesh."""
    if not is_dtensor(tensor):
        yield boxes_of(tensor)
        return
    sizes = tensor.device_mesh.shape
    cuts = [not placement.is_replicate() for placement in tensor.placements]
    ranges = (range(size if is_cut else 1) for size, is_cut in zip(sizes, cuts, strict=True))
    for place in itertools.product(*ranges):
        yield _cut(tensor, place)


def _cut(tensor: Any, place: Sequence[int]) -> Boxes:
    return cut(tuple(tensor.shape), tensor.device_mesh.shape, place, tensor.placements)


def on_grid(shape: Sequence[int], boxes: Boxes, block: int) -> bool:
    """Return whether blocks of `block` elements, counted along the local tensor, are blocks of the whole
    one: every run begins at a multiple of `block`, and is whole blocks."""
    if not boxes:
        return True
    if len(boxes) != 1:
        return False
    box = boxes[0][0]
    depth = _depth(shape, [box])
    strides = contiguous_strides(shape, 1)
    steps = [stride for stride, size in zip(strides, box.sizes[:depth], strict=False) if size > 1]
    numbers = (_start(box, strides), math.prod(box.sizes[depth:]), *steps)
    return all(number % block == 0 for number in numbers)
