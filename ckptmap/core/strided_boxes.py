"""Describe elements of a tensor at regular steps, to rearrange tensors without reading them.

A `StridedBox` has one or more axes. Axis k has `sizes[k]` elements, `steps[k]` apart along dim
`dims[k]`; the first element is at `offsets`. A plain Box has one axis for each dim, and steps of 1.
If rows (h, r, two) of a tensor are to be stored as (h, two, r), two strided boxes of the same sizes
give the source and the target of each element. Several axes may run along one dim. They are then
nested: one step of the outer axis is longer than the whole reach of the inner axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from ckptmap.tensors import Box


class AxisRanges(NamedTuple):
    """Some elements of a strided box: `counts[k]` indices of axis k, from index `starts[k]` on."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class StridedBox:
    """Elements of a tensor at regular steps.

    `offsets` has one entry for each dim of the tensor; `sizes`, `dims` and `steps` have one for
    each axis.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of_box(cls, box: Box) -> StridedBox:
        ndim = len(box.sizes)
        return cls(box.offsets, box.sizes, tuple(range(ndim)), (1,) * ndim)

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @cached_property
    def bounds(self) -> Box:
        """Return the smallest Box that contains every element."""
        reach = [1] * len(self.offsets)
        for n, dim, step in zip(self.sizes, self.dims, self.steps, strict=True):
            reach[dim] += (n - 1) * step
        return Box(self.offsets, tuple(reach))

    @cached_property
    def is_box(self) -> bool:
        """Whether its elements are all elements of `bounds`, in any order of the dims."""
        used = [dim for n, dim in zip(self.sizes, self.dims, strict=True) if n != 1]
        steps = [step for n, step in zip(self.sizes, self.steps, strict=True) if n != 1]
        return len(set(used)) == len(used) and all(step == 1 for step in steps)

    @cached_property
    def _by_dim(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The axes of each dim, outermost first: (axis, size, step, reach of the inner axes)."""
        by_dim = []
        for dim in range(len(self.offsets)):
            axes = [k for k, d in enumerate(self.dims) if d == dim]
            axes.sort(key=lambda k: (self.steps[k], self.sizes[k]))
            rows, reach = [], 0
            for k in axes:
                rows.append((k, self.sizes[k], self.steps[k], reach))
                reach += (self.sizes[k] - 1) * self.steps[k]
            by_dim.append(tuple(reversed(rows)))
        return tuple(by_dim)

    def cut(self, box: Box) -> Iterator[AxisRanges]:
        """Yield the elements that lie in `box`, as ranges of indices of the axes."""
        choices = []
        for dim, axes in enumerate(self._by_dim):
            start = box.offsets[dim] - self.offsets[dim]
            cuts = list(_cut_axes(axes, start, start + box.sizes[dim]))
            if not cuts:
                return
            choices.append(cuts)
        starts, counts = [0] * len(self.sizes), [0] * len(self.sizes)
        for choice in product(*choices):
            for axis, start, count in (entry for entries in choice for entry in entries):
                starts[axis], counts[axis] = start, count
            yield AxisRanges(tuple(starts), tuple(counts))

    def crop(self, starts: Sequence[int], counts: Sequence[int]) -> StridedBox:
        """Return the strided box of a range: `counts[k]` indices of axis k, from `starts[k]` on."""
        offsets = list(self.offsets)
        for start, dim, step in zip(starts, self.dims, self.steps, strict=True):
            offsets[dim] += start * step
        return StridedBox(tuple(offsets), tuple(counts), self.dims, self.steps)

    def boxes(self) -> Iterator[AxisRanges]:
        """Yield ranges of indices of the axes; the elements of each are a plain Box.

        For each dim the innermost axis is kept whole if its step is 1; all other axes are split
        into single indices.
        """
        whole = {
            axes[-1][0] for axes in self._by_dim if axes and (axes[-1][2] == 1 or axes[-1][1] == 1)
        }
        split = [k for k in range(len(self.sizes)) if k not in whole]
        counts = tuple(n if k in whole else 1 for k, n in enumerate(self.sizes))
        for index in product(*(range(self.sizes[k]) for k in split)):
            starts = [0] * len(self.sizes)
            for k, at in zip(split, index, strict=True):
                starts[k] = at
            yield AxisRanges(tuple(starts), counts)


def _cut_axes(
    axes: Sequence[tuple[int, ...]], low: int, high: int
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Yield ranges (axis, first, count) of nested axes, whose positions lie in [low, high)."""
    if not axes:
        if low <= 0 < high:
            yield ()
        return
    (axis, size, step, reach), inner = axes[0], axes[1:]
    first = max(0, -(-low // step))
    last = min(size - 1, (high - 1 - reach) // step)
    before = low // step if low > 0 and low % step else -1
    if 0 <= before < size:
        at = before * step
        for rest in _cut_axes(inner, low - at, high - at):
            yield ((axis, before, 1), *rest)
    if last >= first:
        whole = tuple((k, 0, n) for k, n, _, _ in inner)
        yield ((axis, first, last - first + 1), *whole)
    after = max(last + 1, first)
    if after < size and after != before and after * step < high:
        at = after * step
        for rest in _cut_axes(inner, max(low - at, 0), high - at):
            yield ((axis, after, 1), *rest)


class Piece(NamedTuple):
    """The elements `src` of the tensor named `source`, which become `dst` of another, in order."""

    source: str
    src: StridedBox
    dst: StridedBox

    @property
    def numel(self) -> int:
        return self.dst.numel

    def tidy(self) -> Piece:
        """Return the same piece with as few axes as possible, in the order of the target's dims."""
        src, dst = self.src, self.dst
        axes = [
            [n, sd, ss, dd, ds]
            for n, sd, ss, dd, ds in zip(
                dst.sizes, src.dims, src.steps, dst.dims, dst.steps, strict=True
            )
            if n != 1
        ]
        axes.sort(key=lambda axis: (axis[3], -axis[4]))
        merged: list[list[int]] = []
        for axis in axes:
            n, sd, ss, dd, ds = axis
            if merged and merged[-1][1:] == [sd, ss * n, dd, ds * n]:
                merged[-1] = [merged[-1][0] * n, sd, ss, dd, ds]
            else:
                merged.append(axis)
        sizes = tuple(axis[0] for axis in merged)
        return Piece(
            self.source,
            StridedBox(
                src.offsets, sizes, tuple(a[1] for a in merged), tuple(a[2] for a in merged)
            ),
            StridedBox(
                dst.offsets, sizes, tuple(a[3] for a in merged), tuple(a[4] for a in merged)
            ),
        )


def compose(first: Sequence[Piece], second: Sequence[Piece]) -> list[Piece]:
    """Return the pieces from the sources of `first` to the tensor of `second`.

    `first` are the pieces of an intermediate tensor, which is the only source of `second`.
    """
    pieces: list[Piece] = []
    for a in first:
        for b in second:
            if a.dst.bounds.intersect(b.src.bounds) is not None:
                pieces += _compose_pair(a, b)
    return [piece.tidy() for piece in pieces]


def _compose_pair(a: Piece, b: Piece) -> Iterator[Piece]:
    """Yield pieces for the elements that `a` writes and `b` reads."""
    if a.dst.is_box:
        yield from _by_box(a, b)
        return
    matched = _common_digits(a.dst, b.src)
    if matched is not None:
        yield from _by_digits(a, b, matched)
        return
    for starts, counts in a.dst.boxes():
        part = Piece(a.source, a.src.crop(starts, counts), a.dst.crop(starts, counts)).tidy()
        if part.dst.bounds.intersect(b.src.bounds) is not None:
            yield from _by_box(part, b)


def _by_box(a: Piece, b: Piece) -> Iterator[Piece]:
    """Yield these pieces if `a` fills a plain box: axes of `b` become axes of the source of `a`."""
    axis_of = {
        dim: k for k, (n, dim) in enumerate(zip(a.dst.sizes, a.dst.dims, strict=True)) if n != 1
    }
    for starts, counts in b.src.cut(a.dst.bounds):
        cropped = b.src.crop(starts, counts)
        offsets = list(a.src.offsets)
        for dim, k in axis_of.items():
            offsets[a.src.dims[k]] += (cropped.offsets[dim] - a.dst.offsets[dim]) * a.src.steps[k]
        dims, steps = [], []
        for n, dim, step in zip(counts, cropped.dims, cropped.steps, strict=True):
            k = axis_of.get(dim, -1)
            assert k >= 0 or n == 1, "an axis through a dim of one element"
            dims.append(a.src.dims[k] if k >= 0 else 0)
            steps.append(a.src.steps[k] * step if k >= 0 else 1)
        src = StridedBox(tuple(offsets), tuple(counts), tuple(dims), tuple(steps))
        yield Piece(a.source, src, b.dst.crop(starts, counts))


@dataclass(frozen=True)
class _Digit:
    """The elements that two strided boxes share along one step of one dim.

    n          their number
    a          the first one, counted in such steps from the first element of the first box
    a_axis     the axis of the first box along which they are; -1: none
    a_factor   indices of that axis for each such step
    b, b_axis, b_factor   the same for the second box
    """

    n: int
    a: int
    a_axis: int
    a_factor: int
    b: int
    b_axis: int
    b_factor: int


def _common_digits(a: StridedBox, b: StridedBox) -> list[_Digit] | None:
    """Return the elements that two strided boxes of one tensor share, as digits of their positions.

    A position along a dim is a sum of multiples of steps, as a number is a sum of multiples of
    powers of its base. Boxes that share nothing have a digit with n = 0. Returns None if the steps
    do not divide each other, or if a digit could carry into the next.
    """
    digits: list[_Digit] = []
    for dim in range(len(a.offsets)):
        steps = {s for k, s in enumerate(a.steps) if a.dims[k] == dim and a.sizes[k] != 1}
        steps |= {s for k, s in enumerate(b.steps) if b.dims[k] == dim and b.sizes[k] != 1}
        chain = sorted(steps | {1})
        if any(y % x for x, y in pairwise(chain)):
            return None
        a_digits, b_digits = _split_axes(a, dim, chain), _split_axes(b, dim, chain)
        if a_digits is None or b_digits is None:
            return None
        left = b.offsets[dim] - a.offsets[dim]
        for at in range(len(chain) - 1, -1, -1):
            step = chain[at]
            low, left = divmod(left, step)
            (na, ka, fa), (nb, kb, fb) = a_digits[at], b_digits[at]
            if at < len(chain) - 1 and max(na, low + nb) > chain[at + 1] // step:
                return None
            start = max(0, low)
            stop = min(na, low + nb)
            digits.append(_Digit(max(0, stop - start), start, ka, fa, start - low, kb, fb))
    return digits


def _split_axes(
    strided: StridedBox, dim: int, chain: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Return (size, axis, factor) of a strided box for each step of the chain.

    That is how many such steps the box takes, along which axis (-1: none), and how many indices of
    that axis one step is. Returns None if the steps do not divide an axis evenly.
    """
    digits = [(1, -1, 1)] * len(chain)
    for k, (n, d, step) in enumerate(zip(strided.sizes, strided.dims, strided.steps, strict=True)):
        if d != dim or n == 1:
            continue
        within = [s for s in chain if step <= s < step * n]
        for s, after in zip(within, [*within[1:], step * n], strict=True):
            size, rest = divmod(after, s)
            if rest:
                return None
            digits[chain.index(s)] = (size, k, s // step)
    return digits


def _by_digits(a: Piece, b: Piece, digits: Sequence[_Digit]) -> Iterator[Piece]:
    if any(digit.n == 0 for digit in digits):
        return
    src_offsets, dst_offsets = list(a.src.offsets), list(b.dst.offsets)
    axes = []
    for digit in digits:
        sd, ss, dd, ds = 0, 1, 0, 1
        if digit.a_axis >= 0:
            sd, ss = a.src.dims[digit.a_axis], a.src.steps[digit.a_axis] * digit.a_factor
            src_offsets[sd] += digit.a * ss
        if digit.b_axis >= 0:
            dd, ds = b.dst.dims[digit.b_axis], b.dst.steps[digit.b_axis] * digit.b_factor
            dst_offsets[dd] += digit.b * ds
        axes.append((digit.n, sd, ss, dd, ds))
    sizes = tuple(axis[0] for axis in axes)
    yield Piece(
        a.source,
        StridedBox(tuple(src_offsets), sizes, tuple(x[1] for x in axes), tuple(x[2] for x in axes)),
        StridedBox(tuple(dst_offsets), sizes, tuple(x[3] for x in axes), tuple(x[4] for x in axes)),
    )
