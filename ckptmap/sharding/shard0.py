"""Cut along dim 0 by torch.chunk's rule, as FSDP2 and FSDP1's sharded state dicts do."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.sharding.dtensor_spec import cut_rows
from ckptmap.tensors import Box, Leaf, TensorInfo


class Shard0:
    """`[rows, ...] -> N x [ceil(rows / N), ...]`: the last ranks may hold fewer rows, or none."""

    name = "shard0"

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """One box for each rank that holds rows. A scalar, or an empty tensor, is rank 0's."""
        return cut_rows(info, world_size)

    def join(self, values: Sequence[Leaf], key: str) -> None:
        """None: a part that does not say where it belongs cannot be placed."""
        return None
