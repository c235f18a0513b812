"""Over how many ranks the output is cut, and where each of its tensors goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.errors import PlanError
from ckptmap.planning.module_buffers import BufferEvidence
from ckptmap.protocols import (
    FlatUnit,
    Layout,
    MeshLayout,
    Placement,
    Setup,
)
from ckptmap.tensors import Box, TensorInfo

MAX_WORLD_SIZE = 1 << 17
"""More ranks than anybody trains on: a slip of the finger, that would plan for hours."""

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint
    from ckptmap.planning.options import Options


@runtime_checkable
class UnitLayout(Layout, Protocol):
    """A layout that cuts what several tensors make together."""

    def over_units(self, units: Sequence[str], named: bool, names: Collection[str]) -> UnitLayout:
        """For the modules that are units, by pattern. Raises PlanError CKM206 where one matches
        none of `names`."""

    def unit(self, fqn: str, info: TensorInfo, whole: bool = False) -> FlatUnit | None:
        """The unit that a tensor lies in; None: it is no parameter and whole on every rank, as the
        source shows where it is `whole`."""


def has_units(setup: Setup) -> bool:
    """Does it cut what several tensors make together?"""
    return isinstance(registry.layout(setup.layout), UnitLayout)


class OutputSharding:
    """The layout of one plan: the setup's own, or over the mesh that is asked for."""

    def __init__(self, ckpt: Checkpoint, setup: Setup, options: Options) -> None:
        self._ckpt = ckpt
        self._shown = BufferEvidence(ckpt)
        self._setup = setup
        self._options = options
        self._ranks = self._asked()
        self._layout = self._chosen()
        # Request once: a look at a protocol's methods costs as much as the planning of a tensor.
        self._mesh = self._layout if isinstance(self._layout, MeshLayout) else None
        self.world_size = self._ranks if self._mesh is None else self._mesh.world_size
        self._units = self._over_units()
        self.by_order = self._units is not None
        """Does the order of the tensors decide where their bytes go?"""
        self.by_name = self.by_order or self._mesh is not None
        """Does its name decide how a tensor is cut, beside what it is?"""

    def cut(self, fqn: str, info: TensorInfo) -> tuple[Sequence[tuple[int, Box]], Placement | None]:
        """(rank, box) that tile the tensor once, and how a mesh's ranks hold it."""
        if self._units is not None:
            everywhere = Placement((("", self.world_size),), None)
            return self._units.cut(info, self.world_size), (
                everywhere if self.unit(fqn, info) is None else None
            )
        if self._mesh is None:
            return self._layout.cut(info, self.world_size), None
        placement = self._mesh.placement(fqn, info, self._shown.is_buffer(fqn))
        return self._mesh.chunks(placement, info), placement

    def unit(self, fqn: str, info: TensorInfo) -> FlatUnit | None:
        """The FSDP1 unit that it is flattened in."""
        if self._units is None:
            return None
        return self._units.unit(fqn, info, self._shown.is_buffer(fqn))

    def _over_units(self) -> UnitLayout | None:
        options = self._options
        if isinstance(self._layout, UnitLayout):
            if options.wrap or options.names_like:
                raise PlanError(
                    "CKM204",
                    f"--wrap, --names-like: {self._setup.name} has the names of its units",
                    "leave them out",
                )
            return self._layout.over_units(
                options.fsdp_units, options.use_orig_params, list(self._ckpt)
            )
        if options.fsdp_units or options.use_orig_params:
            raise PlanError(
                "CKM204",
                f"--fsdp-units, --use-orig-params: setup {self._setup.name} has no flat parameters",
                "leave them out, or choose fsdp1-local",
            )
        return None

    def _asked(self) -> int:
        """`--world-size`, else the source's. Raises PlanError CKM204."""
        asked = self._options.world_size
        if asked is not None and not 1 <= asked <= MAX_WORLD_SIZE:
            raise PlanError(
                "CKM204",
                f"--world-size {asked}: expected 1 to {MAX_WORLD_SIZE}",
                "give the ranks that will load it",
            )
        if self._setup.sharded:
            return asked or self._ckpt.world_size
        if asked not in (None, 1):
            raise PlanError(
                "CKM204",
                f"--world-size {asked}: setup {self._setup.name} is not cut over ranks",
                "leave it out, or choose fsdp1 or fsdp2",
            )
        return 1

    def _chosen(self) -> Layout:
        layout, options = registry.layout(self._setup.layout), self._options
        if options.mesh is None and options.tp_plan is None and not isinstance(layout, MeshLayout):
            return layout
        if not self._setup.sharded:
            raise PlanError(
                "CKM204",
                f"{'--tp-plan' if options.mesh is None else '--mesh'}: setup {self._setup.name} is not cut over ranks",
                "leave it out, or choose fsdp2 or fsdp2-ranks",
            )
        mesh = next(one for one in (layout, *registry.layouts()) if isinstance(one, MeshLayout))
        ranks = options.world_size if options.mesh is not None else self._ranks
        return mesh.over(options.mesh, options.tp_plan, ranks, list(self._ckpt))
