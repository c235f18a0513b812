"""A lattice as the plain list of its positions."""

from __future__ import annotations

from itertools import product

from ckptmap.core.strided_boxes import StridedBox


def positions(lattice: StridedBox) -> list[tuple[int, ...]]:
    """Every element's place, the last axis fastest."""
    found = []
    for index in product(*map(range, lattice.sizes)):
        at = list(lattice.offsets)
        for i, dim, step in zip(index, lattice.dims, lattice.steps, strict=True):
            at[dim] += i * step
        found.append(tuple(at))
    return found
