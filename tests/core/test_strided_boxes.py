"""Strided boxes and their composition, against plain lists of positions."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmap.core.strided_boxes import Piece, StridedBox, compose
from ckptmap.tensors import Box
from tests.support.examples import examples
from tests.support.strided_boxes import positions


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[StridedBox, StridedBox, tuple[int, ...]]:
    """The axes of one space in two orders, each split into dims: source, target, sizes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return _laid(draw, sizes), _laid(draw, sizes), tuple(sizes)


def _laid(draw: st.DrawFn, sizes: list[int], margin: int = 0) -> StridedBox:
    order = draw(st.permutations(range(len(sizes))))
    cuts = sorted(draw(st.sets(st.integers(1, len(sizes)), max_size=2)))
    dims, steps = [0] * len(sizes), [1] * len(sizes)
    ndim = 0
    for start, stop in zip([0, *cuts], [*cuts, len(sizes)], strict=True):
        step = 1
        for axis in reversed(order[start:stop]):
            dims[axis], steps[axis] = ndim, step
            step *= sizes[axis]
        ndim += 1
    return StridedBox((margin,) * ndim, tuple(sizes), tuple(dims), tuple(steps))


@given(laid_out(), st.data())
def test_cut_is_what_lies_in_the_box(
    found: tuple[StridedBox, StridedBox, tuple[int, ...]], data: st.DataObject
) -> None:
    strided, _, _ = found
    reach = strided.bounds.sizes
    offsets = tuple(data.draw(st.integers(-1, n)) for n in reach)
    sizes = tuple(data.draw(st.integers(1, n + 1)) for n in reach)
    inside = [
        at
        for at in positions(strided)
        if all(o <= p < o + n for p, o, n in zip(at, offsets, sizes, strict=True))
    ]
    parts = [
        at
        for lows, counts in strided.cut(Box(offsets, sizes))
        for at in positions(strided.crop(lows, counts))
    ]
    assert sorted(parts) == sorted(inside)


@given(laid_out())
def test_boxes_are_the_same_elements(found: tuple[StridedBox, StridedBox, tuple[int, ...]]) -> None:
    strided, _, _ = found
    parts = [strided.crop(*index) for index in strided.boxes()]
    assert sorted(at for part in parts for at in positions(part)) == sorted(positions(strided))
    assert all(part.bounds.numel == part.numel for part in parts)


@given(laid_out())
def test_tidy_walks_the_same_way(found: tuple[StridedBox, StridedBox, tuple[int, ...]]) -> None:
    src, dst, _ = found
    piece = Piece("x", src, dst)
    walks = set(zip(positions(src), positions(dst), strict=True))
    tidy = piece.tidy()
    assert set(zip(positions(tidy.src), positions(tidy.dst), strict=True)) == walks
    assert len(tidy.dst.sizes) <= len(dst.sizes)


def walk(pieces: list[Piece]) -> dict[tuple[int, ...], tuple[str, tuple[int, ...]]]:
    """Target element -> source element; no element twice."""
    found: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}
    for piece in pieces:
        for src, dst in zip(positions(piece.src), positions(piece.dst), strict=True):
            assert dst not in found, f"{dst} is filled twice"
            found[dst] = (piece.source, src)
    return found


@st.composite
def chained(draw: st.DrawFn) -> tuple[list[Piece], list[Piece]]:
    """Two rearrangements of a tensor [n, 6]: the first puts it together of `cuts` sources, the
    second walks all of it or a slice, with factors of n that need not be the first's."""
    n = draw(st.sampled_from([6, 8, 12, 24]))
    first, at = [], 0
    while at < n:
        rows = draw(st.integers(1, n - at))
        first.append(_rearranged(draw, f"s{len(first)}", rows, at, into=True))
        at += rows
    low = draw(st.integers(0, n - 1))
    rows = draw(st.integers(1, n - low))
    return first, [_rearranged(draw, "hub", rows, low, into=False)]


def _rearranged(draw: st.DrawFn, source: str, rows: int, at: int, into: bool) -> Piece:
    """Rows at `at` of the middle tensor from (into) or to a tensor with them in another order."""
    factors = []
    left = rows
    while left > 1:
        factor = draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0]))
        factors.append(factor)
        left //= factor
    sizes = [*factors, 6]
    steps, step = [], 1
    for n in reversed(factors):
        steps.append(step)
        step *= n
    middle = StridedBox((at, 0), tuple(sizes), (*(0 for _ in factors), 1), (*reversed(steps), 1))
    outer = _laid(draw, sizes)
    return Piece(source, outer, middle) if into else Piece(source, middle, outer)


@examples(400)
@given(chained())
def test_composition_is_one_walk_after_the_other(found: tuple[list[Piece], list[Piece]]) -> None:
    first, second = found
    there, back = walk(first), walk(second)
    expected = {dst: there[src] for dst, (_, src) in back.items()}
    assert walk(compose(first, second)) == expected


def test_there_and_back_is_one_axis_a_dim() -> None:
    """RoPE's permutation and its inverse, [h two r] -> [h r two] -> [h two r]."""
    halves = StridedBox((0, 0), (6, 4, 2, 40), (0, 0, 0, 1), (8, 1, 4, 1))
    pairs = StridedBox((0, 0), (6, 4, 2, 40), (0, 0, 0, 1), (8, 2, 1, 1))
    (piece,) = compose([Piece("w", halves, pairs)], [Piece("hub", pairs, halves)])
    assert piece.src == piece.dst == StridedBox((0, 0), (48, 40), (0, 1), (1, 1))


@pytest.mark.parametrize(
    "box", [Box((0, 0), (48, 40)), Box((5, 3), (17, 2)), Box((47, 39), (1, 1))]
)
def test_a_cut_of_many_rows_is_few_boxes(box: Box) -> None:
    """Five at most for three axes a dim: a rearranged tensor does not fall apart into rows."""
    pairs = StridedBox((0, 0), (6, 4, 2, 40), (0, 0, 0, 1), (8, 2, 1, 1))
    parts = list(pairs.cut(box))
    assert len(parts) <= 5
    assert sum(prod(counts) for _, counts in parts) == box.numel
