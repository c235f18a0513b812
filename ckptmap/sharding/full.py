"""The layout without sharding: rank 0 holds every tensor whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ckptmap.tensors import Box, Leaf, TensorInfo


@lru_cache(maxsize=4096)
def _cut(shape: tuple[int, ...]) -> tuple[tuple[int, Box]]:
    """Return the one chunk; shared by all tensors of a shape."""
    return ((0, Box.whole(shape)),)


class Full:
    """One box that is the whole tensor."""

    name = "full"

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """Return [(0, whole)], whatever the world size."""
        return _cut(info.shape)

    def join(self, values: Sequence[Leaf], key: str) -> None:
        """Return None: whole tensors are not joined."""
        return None
