"""Values of which many are one object: what a hundred thousand tensors have is mostly of few kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def distinct(values: Collection[T]) -> dict[int, T]:
    """The objects that there are, by id, in order of first appearance."""
    return dict(zip(map(id, values), values, strict=True))


def each(values: Collection[T], make: Callable[[T], R]) -> list[R]:
    """`make` of each, called once for those that are one object."""
    made = {key: make(value) for key, value in distinct(values).items()}
    return list(map(made.__getitem__, map(id, values)))
