"""The Shard(0) layout: dim 0 is cut by the rule of torch.chunk, as FSDP2 and FSDP1's sharded state
dicts do."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.sharding.dtensor_spec import cut_rows
from ckptmap.tensors import Box, Leaf, TensorInfo


class Shard0:
    """`[rows, ...] -> N x [ceil(rows / N), ...]`: the last ranks may hold fewer rows, or none."""

    name = "shard0"

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """Return the box of each rank that holds rows; rank 0 holds a scalar or an empty tensor."""
        return cut_rows(info, world_size)

    def join(self, values: Sequence[Leaf], key: str) -> None:
        """Return None: plain tensors do not say which rows they hold."""
        return None
