"""Layouts: how logical tensors are cut over ranks and put together again."""

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
        """Return (rank, box) in rank order; the boxes tile the tensor exactly once, and none is empty
        unless the tensor is."""

    def join(self, values: Sequence[Leaf], key: str) -> StoredTensor | Cut | Opaque | None:
        """Return the tensor whose parts these values are, one a rank; None: they are not this layout's.

        Raises SourceError where the parts do not fit together.
        """


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
        """Return the layout over a mesh such as `"replicate=2,shard=4"`; None: one dim of the world
        size.

        `tp_plan` is a file of which every pattern must match one of `names`. Raises PlanError
        CKM204 where mesh and world size do not fit together, CKM201 and CKM206 for the plan.
        """

    @property
    def world_size(self) -> int: ...

    def placement(self, fqn: str, info: TensorInfo, whole: bool) -> Placement:
        """Return how ranks hold the tensor. `whole`: in the source every rank held all of it, though only
        parts of other tensors."""

    def chunks(self, placement: Placement, info: TensorInfo) -> Sequence[tuple[int, Box]]:
        """Return (rank, box) that tile the tensor once, each box on the first rank that holds it.

        Raises PlanError CKM504 where torch cannot hold the tensor so.
        """


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """An FSDP1 unit, by the name of its module ("" the root), which flattens the parameters in it.

    `named`: with `use_orig_params=True`, each is there by its own name, too.
    """

    prefix: str
    named: bool
