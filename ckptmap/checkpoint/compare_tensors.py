"""Compare two tensors box by box, so that neither is in memory as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.protocols import Write
from ckptmap.storage.box_reader import fill, row_major_boxes
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, StoredTensor

if TYPE_CHECKING:
    import torch

BLOCK_NBYTES = 4 << 20
BLOCK_NUMEL = 1 << 20


@dataclass(frozen=True)
class Difference:
    """How two tensors of one shape differ: where first, by how much, in how many elements."""

    count: int
    max_abs: float
    relative: float
    """rms of the difference over rms of the first."""
    index: tuple[int, ...]
    lost: int = 0
    """Elements that are finite in the first, and NaN or infinite in the second."""


def same_bytes(a: StoredTensor, b: StoredTensor, files_a: Files, files_b: Files) -> Box | None:
    """Return the first box in which the two tensors hold different bytes; None: there is none."""
    limit = max(1, BLOCK_NBYTES // a.info.itemsize)
    for box in row_major_boxes(Box.whole(a.info.shape), limit):
        a_bytes, b_bytes = (bytearray(box.numel * a.info.itemsize) for _ in range(2))
        fill(files_a, a, box, memoryview(a_bytes))
        fill(files_b, b, box, memoryview(b_bytes))
        if a_bytes != b_bytes:
            return box
    return None


def same_parts(a: LazyTensor, b: LazyTensor) -> str | None:
    """Return the name of the first part whose bytes differ; None: both tensors are stored alike.

    Raises RunError CKM310 where the replicas of one of them differ.
    """
    for lazy in (a, b):
        lazy.require_replicas()
    for name, part in a.parts.items():
        other = b.parts.get(name)
        if other is None or other.info != part.info:
            return name or "values"
        if same_bytes(part, other, a.files, b.files) is not None:
            return name or "values"
    return None


def difference(
    a: LazyTensor, b: LazyTensor, seen: Callable[[torch.Tensor], None] | None = None
) -> Difference | None:
    """Return how the decoded values differ; None: they are bit-equal.

    If only the dtype differs, the first is cast to the second's. NaNs of the same bits are equal.
    `seen` gets the differences of every box in which there are some, as float64.
    """
    import torch

    count, lost, worst, first = 0, 0, 0.0, None
    squares_diff = squares = 0.0
    for box in row_major_boxes(Box.whole(a.shape), BLOCK_NUMEL):
        a_stored, b_values = (_countable(lazy.read(box.offsets, box.sizes)) for lazy in (a, b))
        a_values = a_stored.to(b_values.dtype) if a_stored.dtype != b_values.dtype else a_stored
        unequal = _unequal(a_values, b_values)
        squares += _squares(a_values)
        if not bool(unequal.any()):
            continue
        count += int(unequal.sum())
        if first is None:
            at = torch.nonzero(unequal)[0].tolist() if unequal.ndim else []
            first = tuple(o + i for o, i in zip(box.offsets, at, strict=True))
        delta = (
            a_values.double() - b_values.double()
            if not a_values.is_complex()
            else (a_values - b_values).abs().double()
        )
        if seen is not None:
            seen(delta)
        worst = max(worst, float(delta.nan_to_num(nan=float("inf")).abs().max()))
        square = float((delta * delta).sum())
        squares_diff += square
        lost += 0 if math.isfinite(square) else _lost(a_stored, b_values)
    if first is None:
        return None
    return Difference(count, worst, _relative(squares_diff, squares), first, lost)


def _relative(squares_diff: float, squares: float) -> float:
    """Return the root of the quotient. If the first tensor is all zeros, a difference of signs is an
    error of 0, any other difference one of infinity."""
    if squares_diff == 0:
        return 0.0
    return (squares_diff / squares) ** 0.5 if squares else float("inf")


def _countable(values: torch.Tensor) -> torch.Tensor:
    """Return values that torch can compute with: pairs of 4-bit floats, which have neither arithmetic
    nor a cast, become the bytes that hold them."""
    import torch

    return values.view(torch.uint8) if values.dtype == torch.float4_e2m1fn_x2 else values


def worst(errors: Mapping[str, float]) -> str:
    """Return the name of the largest error; NaN counts as larger than any number."""
    return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))


def sampled_error(a: LazyTensor, b: LazyTensor, numel: int) -> tuple[float, int]:
    """Return the relative error of b in a sample, and how many values b has lost there.

    The sample is up to 4 evenly spaced runs of rows, or parts of a row that has more values than `numel`,
    `numel` values in all. The error is the rms of
    b - a over the rms of a. A value is lost that is finite in a, and NaN or infinite in b.
    """
    squares_diff = squares = 0.0
    lost = 0
    boxes = list(_sample(a.shape, numel, runs=4))
    for box in boxes:
        a_values, b_values = a.read(box.offsets, box.sizes), b.read(box.offsets, box.sizes)
        squares += _squares(a_values)
        square = _squares(a_values.double() - b_values.double())
        squares_diff += square
        lost += 0 if math.isfinite(square) else _lost(a_values, b_values)
    return _relative(squares_diff, squares), lost


def _sample(shape: tuple[int, ...], numel: int, runs: int) -> Iterator[Box]:
    if not shape or 0 in shape:
        return
    inner = math.prod(shape[1:])
    if inner > numel:
        yield from _parts_of_rows(shape, max(1, numel // runs), runs)
        return
    rows = max(1, min(shape[0], numel // inner) // runs)
    starts = {(shape[0] - rows) * i // max(1, runs - 1) for i in range(runs)}
    for start in sorted(starts):
        yield Box((start, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def _parts_of_rows(shape: tuple[int, ...], numel: int, runs: int) -> Iterator[Box]:
    """Yield boxes of up to `numel` values each, spaced along all dims from the first corner to the last."""
    sizes: tuple[int, ...] = ()
    for size in reversed(shape):
        sizes = (min(size, max(1, numel // math.prod(sizes))), *sizes)
    for run in range(runs):
        free = [size - taken for size, taken in zip(shape, sizes, strict=True)]
        yield Box(tuple(n * run // max(1, runs - 1) for n in free), sizes)


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where the bits differ: NaN equals the same NaN, -0.0 does not equal 0.0."""
    import torch

    itemsize = a.element_size()
    if a.dtype == torch.bool or itemsize > 8:
        return a != b
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    return a.view(ints) != b.view(ints)


def _lost(before_values: torch.Tensor, after_values: torch.Tensor) -> int:
    was_finite, is_finite = _wide(before_values).isfinite(), _wide(after_values).isfinite()
    return int((was_finite & ~is_finite).sum())


def _squares(values: torch.Tensor) -> float:
    wide = _wide(values)
    return float((wide * wide).sum())


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.abs().double() if values.is_complex() else values.double()


def holds(lazy: LazyTensor, write: Write) -> bool:
    """Return whether a stored part holds these values in a flat range, bit for bit."""
    import torch

    stored, box = lazy.parts[write.part].info, write.box
    if len(stored.shape) == 1:
        stored_values = lazy.read_part(write.part, box)
    else:  # the rows that cover the range, then the range of them
        (start,), (count,) = box.offsets, box.sizes
        row = math.prod(stored.shape[1:])
        first, last = (start // row, -(-(start + count) // row)) if stored.shape else (0, 0)
        zeros = (0,) * len(stored.shape[1:])
        rows = (
            Box((first, *zeros), (last - first, *stored.shape[1:])) if stored.shape else Box((), ())
        )
        stored_values = lazy.read_part(write.part, rows).view(-1)[start - first * row :][:count]
    return torch.equal(
        stored_values.contiguous().view(-1).view(torch.uint8),
        write.values.cpu().contiguous().view(-1).view(torch.uint8),
    )
