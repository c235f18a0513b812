"""What cuts logical tensors over ranks, and puts them together again."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from ckptmap.tensors import Box, Cut, Leaf, Opaque, StoredTensor, TensorInfo


@dataclass(frozen=True)
class Placement:
    """How the ranks of a mesh hold a tensor, for a writer that gives each rank a file of its own.

    mesh    (name, size) of the mesh dims, ranks row-major; a name may be ""
    shards  for each mesh dim the tensor dim that it cuts, None: replicated, ABSENT: the tensor
            knows nothing of this mesh dim, its ranks hold the same. None instead of all of them:
            a plain tensor, whole on every rank
    """

    mesh: tuple[tuple[str, int], ...]
    shards: tuple[int | None, ...] | None

    ABSENT: ClassVar[int] = -1

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.mesh)


class Layout(Protocol):
    """One way of cutting a logical tensor over ranks."""

    name: str

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """(rank, box) in rank order; the boxes tile the tensor exactly once, none is empty
        unless the tensor is."""

    def join(self, values: Sequence[Leaf], key: str) -> StoredTensor | Cut | Opaque | None:
        """The tensor that these values, one a rank, are the parts of; None: not this layout's.
        Raises SourceError where the parts do not fit together."""


@runtime_checkable
class MeshLayout(Layout, Protocol):
    """A layout that cuts by name, over a mesh of ranks."""

    def over(
        self,
        mesh: str | None,
        tp_plan: str | None,
        world_size: int | None,
        names: Collection[str],
    ) -> MeshLayout:
        """For the mesh that is asked for: `"replicate=2,shard=4"`; None: one dim of the world
        size. `tp_plan` is a file, of which every pattern must match one of `names`. Raises
        PlanError CKM204 where they do not fit together, CKM201 and CKM206 for the plan."""

    @property
    def world_size(self) -> int: ...

    def placement(self, fqn: str, info: TensorInfo, whole: bool) -> Placement:
        """`whole`: no rank of the source held only a part of it, though of others they did."""

    def chunks(self, placement: Placement, info: TensorInfo) -> Sequence[tuple[int, Box]]:
        """(rank, box) that tile the tensor once, each on the first rank that holds it. Raises
        PlanError CKM504 where torch cannot hold it so."""


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """An FSDP1 unit, by the name of its module ("" the root), which flattens the parameters in it.

    `named`: with `use_orig_params=True`, each is there by its own name, too.
    """

    prefix: str
    named: bool
