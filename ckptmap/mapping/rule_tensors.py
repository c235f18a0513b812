"""The tensors of one rule: its sources, its targets, and the boxes that they occupy in the rule's axes.

A rule names axes, and these span a space with one element per index on every axis. Each tensor of the
rule holds the elements of one box of that space (`AxisBox`), in an order of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptmap.core.strided_boxes import Piece, StridedBox
from ckptmap.mapping.rules import Term
from ckptmap.tensors import Box, TensorInfo


@dataclass(frozen=True, slots=True)
class RuleSource:
    """A source tensor: its key, which term of the rule it belongs to, and its stacked captures.

    `stack` holds the values of the captures that are an axis of the other side, e.g. an expert's number.
    """

    key: str
    term: int
    stack: tuple[int, ...]
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class RuleTarget:
    """A target tensor and the pieces of sources that tile it, but for the box `zeros`.

    `stack` maps each capture that is an axis of the other side to its value. `whole` is the key of the
    source that equals the target element for element, if there is one.
    """

    name: str
    term: Term
    stack: Mapping[str, int]
    info: TensorInfo
    pieces: tuple[Piece, ...]
    zeros: Box | None
    whole: str | None


def is_whole(piece: Piece, source: TensorInfo, target: TensorInfo) -> bool:
    """Return whether the piece is all of both tensors, in the same order and shape."""
    if source != target or piece.numel != target.numel:
        return False
    return piece.src == piece.dst


@dataclass(frozen=True, slots=True)
class AxisBox:
    """The box of one tensor in the space of axes, and where its elements lie in the tensor.

    low, size   axis -> first index and extent of the box
    offsets     index of the box's first element in the tensor, one number a dim
    axes        axis -> (dim, step): a step of one along the axis is `step` along the dim
    """

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
        """Return where a part of the box lies in the tensor, walked along the axes in `moving`."""
        offsets = list(self.offsets)
        for axis, (dim, step) in self.axes.items():
            offsets[dim] += (low[axis] - self.low[axis]) * step
        return StridedBox(
            tuple(offsets),
            tuple(sizes[axis] for axis in moving),
            tuple(self.axes[axis][0] for axis in moving),
            tuple(self.axes[axis][1] for axis in moving),
        )
