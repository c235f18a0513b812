"""The tensors of a rule as values: what is there, what is made, and boxes in the space of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptmap.core.strided_boxes import Piece, StridedBox
from ckptmap.mapping.rules import Term
from ckptmap.tensors import Box, TensorInfo


@dataclass(frozen=True, slots=True)
class RuleSource:
    """A tensor that is there: its term, and the numbers of captures that are axes elsewhere."""

    key: str
    term: int
    stack: tuple[int, ...]
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class RuleTarget:
    """A tensor that is made, of a term and the numbers of its captures that are axes elsewhere;
    `whole` is the one source that it is, element for element."""

    name: str
    term: Term
    stack: Mapping[str, int]
    info: TensorInfo
    pieces: tuple[Piece, ...]
    zeros: Box | None
    whole: str | None


def is_whole(piece: Piece, source: TensorInfo, target: TensorInfo) -> bool:
    """Is one the other, element for element in the same order and shape?"""
    if source != target or piece.numel != target.numel:
        return False
    return piece.src == piece.dst


@dataclass(frozen=True, slots=True)
class AxisBox:
    """The box of one tensor in the space, and where its elements lie in the tensor."""

    low: Mapping[str, int]
    size: Mapping[str, int]
    offsets: tuple[int, ...]
    axes: Mapping[str, tuple[int, int]]

    @property
    def box(self) -> Box:
        return Box(tuple(self.low.values()), tuple(self.size.values()))

    def strided(
        self, low: Mapping[str, int], sizes: Mapping[str, int], moving: Sequence[str]
    ) -> StridedBox:
        """The elements of a part of the space, walked by the axes in `moving`."""
        offsets = list(self.offsets)
        for axis, (dim, step) in self.axes.items():
            offsets[dim] += (low[axis] - self.low[axis]) * step
        return StridedBox(
            tuple(offsets),
            tuple(sizes[axis] for axis in moving),
            tuple(self.axes[axis][0] for axis in moving),
            tuple(self.axes[axis][1] for axis in moving),
        )
