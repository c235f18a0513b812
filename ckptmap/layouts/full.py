"""Not cut at all: every tensor whole, on rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.tensors import Box, Leaf, TensorInfo


class Full:
    """One box that is the whole tensor."""

    name = "full"

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """[(0, whole)], whatever the world size."""
        return [(0, Box.whole(info.shape))]

    def join(self, values: Sequence[Leaf], key: str) -> None:
        """None: a whole tensor is nothing to be joined."""
        return None
