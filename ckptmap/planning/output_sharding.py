"""Decide how the output is cut over ranks: the world size, and the chunks of each tensor.

The setup names a layout (whole tensors, `Shard(0)`, flat parameters of FSDP1). With --mesh or
--tp-plan the chunks are those of DTensors on a device mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import PlanError
from ckptmap.planning.module_buffers import BufferEvidence
from ckptmap.planning.options import Options
from ckptmap.protocols import FlatUnit, Layout, MeshLayout, Placement, Setup
from ckptmap.tensors import Box, TensorInfo

MAX_WORLD_SIZE = 1 << 17
"""Ranks at most. More is a mistyped number, whose plan would take hours."""


@runtime_checkable
class UnitLayout(Layout, Protocol):
    """A layout that joins the parameters of a module, flattened, and cuts the whole: FSDP1."""

    def over_units(self, units: Sequence[str], named: bool, names: Collection[str]) -> UnitLayout:
        """Return the layout for these modules, given as patterns; `named`: use_orig_params=True.

        Raises PlanError CKM206 where a pattern matches none of `names`.
        """

    def unit(self, fqn: str, info: TensorInfo, whole: bool = False) -> FlatUnit | None:
        """Return the unit that a parameter is flattened in.

        None: it is a buffer and whole on every rank, which `whole` says the source shows.
        """


def has_units(setup: Setup) -> bool:
    """Return whether the setup joins parameters into flat ones."""
    return isinstance(registry.layout(setup.layout), UnitLayout)


class OutputSharding:
    """The layout of one plan: the setup's own, or the one of --mesh and --tp-plan.

    Raises PlanError CKM204 for options that do not fit the setup.

    world_size  ranks that the output is cut for
    by_order    does the order of the tensors decide where their bytes go?
    by_name     does the name of a tensor decide how it is cut, besides its shape and dtype?
    """

    def __init__(self, ckpt: Checkpoint, setup: Setup, options: Options) -> None:
        self._ckpt = ckpt
        self._evidence = BufferEvidence(ckpt)
        self._setup = setup
        self._options = options
        self._ranks = self._requested_ranks()
        self._layout = self._chosen_layout()
        # Checked here, once: isinstance with a protocol costs as much as planning a tensor.
        self._mesh = self._layout if isinstance(self._layout, MeshLayout) else None
        self.world_size = self._ranks if self._mesh is None else self._mesh.world_size
        self._units = self._over_units()
        self.by_order = self._units is not None
        self.by_name = self.by_order or self._mesh is not None

    def cut(self, fqn: str, info: TensorInfo) -> tuple[Sequence[tuple[int, Box]], Placement | None]:
        """Return the (rank, box) that tile the tensor once, and its placement on a device mesh."""
        if self._units is not None:
            chunks = self._units.cut(info, self.world_size)
            if self.unit(fqn, info) is not None:
                return chunks, None
            return chunks, Placement((("", self.world_size),), None)  # a buffer, on every rank
        if self._mesh is None:
            return self._layout.cut(info, self.world_size), None
        placement = self._mesh.placement(fqn, info, self._evidence.is_buffer(fqn))
        return self._mesh.chunks(placement, info), placement

    def unit(self, fqn: str, info: TensorInfo) -> FlatUnit | None:
        """Return the FSDP1 unit that a parameter is flattened in; None: it is in none."""
        if self._units is None:
            return None
        return self._units.unit(fqn, info, self._evidence.is_buffer(fqn))

    def _over_units(self) -> UnitLayout | None:
        options = self._options
        if isinstance(self._layout, UnitLayout):
            if options.wrap or options.names_like:
                raise PlanError(
                    "CKM204",
                    f"--wrap, --names-like: {self._setup.name} has the names of its units",
                    "leave these options out",
                )
            return self._layout.over_units(
                options.fsdp_units, options.use_orig_params, list(self._ckpt)
            )
        if options.fsdp_units or options.use_orig_params:
            raise PlanError(
                "CKM204",
                f"--fsdp-units, --use-orig-params: setup {self._setup.name} has no flat parameters",
                "leave these options out, or choose --to fsdp1-local",
            )
        return None

    def _requested_ranks(self) -> int:
        """Return --world-size, or the world size of the source."""
        world_size = self._options.world_size
        if world_size is not None and not 1 <= world_size <= MAX_WORLD_SIZE:
            raise PlanError(
                "CKM204",
                f"--world-size {world_size}: expected 1 to {MAX_WORLD_SIZE}",
                "give the number of ranks that will load it",
            )
        if self._setup.sharded:
            return world_size or self._ckpt.world_size
        if world_size not in (None, 1):
            raise PlanError(
                "CKM204",
                f"--world-size {world_size}: setup {self._setup.name} is not cut over ranks",
                "leave --world-size out, or choose --to fsdp1 or --to fsdp2",
            )
        return 1

    def _chosen_layout(self) -> Layout:
        layout, options = registry.layout(self._setup.layout), self._options
        if options.mesh is None and options.tp_plan is None and not isinstance(layout, MeshLayout):
            return layout
        if not self._setup.sharded:
            option = "--tp-plan" if options.mesh is None else "--mesh"
            raise PlanError(
                "CKM204",
                f"{option}: setup {self._setup.name} is not cut over ranks",
                f"leave {option} out, or choose --to fsdp2 or --to fsdp2-ranks",
            )
        mesh = next(
            candidate
            for candidate in (layout, *registry.layouts())
            if isinstance(candidate, MeshLayout)
        )
        ranks = options.world_size if options.mesh is not None else self._ranks
        return mesh.over(options.mesh, options.tp_plan, ranks, list(self._ckpt))
