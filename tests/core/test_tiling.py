"""A set of boxes is proven to tile a tensor; holes and overlaps are named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmap.core.tiling import prove_rows, prove_tiling
from ckptmap.tensors import Box


def grid(shape: tuple[int, ...], cuts: int, seed: int) -> list[Box]:
    """A random tiling: boxes are split along random dims."""
    rng = random.Random(seed)
    boxes = [Box.whole(shape)]
    for _ in range(cuts):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d, n in enumerate(box.sizes) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = rng.choice(dims)
        at = rng.randrange(1, box.sizes[dim])
        first = tuple(at if d == dim else n for d, n in enumerate(box.sizes))
        rest = tuple(n - at if d == dim else n for d, n in enumerate(box.sizes))
        moved = tuple(o + at if d == dim else o for d, o in enumerate(box.offsets))
        boxes += [Box(box.offsets, first), Box(moved, rest)]
    rng.shuffle(boxes)
    return boxes


@given(
    st.lists(st.integers(1, 9), max_size=3).map(tuple), st.integers(0, 12), st.integers(0, 10**6)
)
def test_tilings_hold_and_broken_ones_do_not(shape: tuple[int, ...], cuts: int, seed: int) -> None:
    boxes = grid(shape, cuts, seed)
    assert prove_tiling(shape, boxes) is None
    assert prove_tiling(shape, boxes[1:]) is not None
    assert prove_tiling(shape, [*boxes, boxes[0]]) is not None


@pytest.mark.parametrize(
    ("shape", "boxes", "text"),
    [
        ((4,), [Box((0,), (2,)), Box((1,), (2,))], r"\[0\]\+\[2\] and \[1\]\+\[2\] overlap"),
        ((4,), [Box((0,), (3,))], "cover 3 of 4"),
        ((4,), [Box((0,), (5,))], "leaves the shape"),
        ((4,), [Box((0, 0), (4, 1))], "leaves the shape"),
        ((), [], "cover 0 of 1"),
        ((), [Box((), ()), Box((), ())], "overlap"),
    ],
)
def test_says_what_is_wrong(shape: tuple[int, ...], boxes: list[Box], text: str) -> None:
    import re

    wrong = prove_tiling(shape, boxes)
    assert wrong is not None
    assert re.search(text, wrong)


def test_empty_tensor_needs_no_chunk() -> None:
    assert prove_tiling((0, 5), []) is None
    assert prove_tiling((0, 5), [Box((0, 0), (0, 5))]) is None


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ((0, 2, 5), None),
        ((0, 2, 2, 5), "rows 2 to 2"),
        ((0, 3, 2, 5), "rows 3 to 2"),
        ((0, 2, 4), "cover rows 0 to 4 of 5"),
        ((1, 2, 5), "cover rows 1 to 5 of 5"),
        ((0, 2, 6), "cover rows 0 to 6 of 5"),
    ],
)
def test_rows_rise_from_the_first_to_past_the_last(
    bounds: tuple[int, ...], text: str | None
) -> None:
    wrong = prove_rows((5, 3), bounds)
    assert wrong is None if text is None else text in (wrong or "")
