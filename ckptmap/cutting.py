"""Over how many ranks the output is cut, and where each of its tensors goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.coverage import prove_tiling
from ckptmap.errors import PlanError
from ckptmap.protocols import (
    FlatUnit,
    Group,
    Layout,
    MeshLayout,
    OutTensor,
    Placement,
    Setup,
)
from ckptmap.steps import FilePlan
from ckptmap.tensors import Box, Path, TensorInfo
from ckptmap.woven import Pieced

MAX_WORLD_SIZE = 1 << 17
"""More ranks than anybody trains on: a slip of the finger, that would plan for hours."""

if TYPE_CHECKING:
    from ckptmap.checkpoint import Checkpoint
    from ckptmap.plans import Options


@runtime_checkable
class UnitLayout(Layout, Protocol):
    """A layout that cuts what several tensors make together."""

    def over_units(self, units: Sequence[str], named: bool, names: Collection[str]) -> UnitLayout:
        """For the modules that are units, by pattern. Raises PlanError CKM206 where one matches
        none of `names`."""

    def unit(self, fqn: str, info: TensorInfo) -> FlatUnit | None:
        """The unit that a tensor lies in; None: it is no parameter and whole on every rank."""


def has_units(setup: Setup) -> bool:
    """Does it cut what several tensors make together?"""
    return isinstance(registry.layout(setup.layout), UnitLayout)


class Cutter:
    """The layout of one plan: the setup's own, or over the mesh that is asked for."""

    def __init__(self, ckpt: Checkpoint, setup: Setup, options: Options) -> None:
        self._ckpt = ckpt
        self._setup = setup
        self._options = options
        self._ranks = self._asked()
        self._layout = self._chosen()
        # Asked once: a look at a protocol's methods costs as much as the planning of a tensor.
        self._mesh = self._layout if isinstance(self._layout, MeshLayout) else None
        self.world_size = self._ranks if self._mesh is None else self._mesh.world_size
        self._units = self._over_units()
        self.by_order = self._units is not None
        """Does the order of the tensors decide where their bytes go?"""

    def cut(self, fqn: str, info: TensorInfo) -> tuple[Sequence[tuple[int, Box]], Placement | None]:
        """(rank, box) that tile the tensor once, and how a mesh's ranks hold it."""
        if self._units is not None:
            everywhere = Placement((("", self.world_size),), None)
            return self._units.cut(info, self.world_size), (
                everywhere if self.unit(fqn, info) is None else None
            )
        if self._mesh is None:
            return self._layout.cut(info, self.world_size), None
        placement = self._mesh.placement(fqn, info, self._is_whole(fqn))
        return self._mesh.chunks(placement, info), placement

    def unit(self, fqn: str, info: TensorInfo) -> FlatUnit | None:
        """The FSDP1 unit that it is flattened in."""
        return None if self._units is None else self._units.unit(fqn, info)

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
                f"--mesh: setup {self._setup.name} is not cut over ranks",
                "leave it out, or choose fsdp2 or fsdp2-ranks",
            )
        mesh = layout if isinstance(layout, MeshLayout) else registry.layout("mesh")
        assert isinstance(mesh, MeshLayout), "the registry's mesh layout is one"
        ranks = options.world_size if options.mesh is not None else self._ranks
        return mesh.over(options.mesh, options.tp_plan, ranks, list(self._ckpt))

    @cached_property
    def _some_are_cut(self) -> bool:
        return any(_is_cut(self._ckpt.group(fqn)) for fqn in self._ckpt)

    def _is_whole(self, fqn: str) -> bool:
        """Did the source, which cut others over its ranks, not cut this one? So it does with
        buffers."""
        if fqn not in self._ckpt or not self._some_are_cut:
            return False
        group = self._ckpt.group(fqn)
        return not _is_cut(group) and group.info.shape[:1] > (1,)


def _is_cut(group: Group) -> bool:
    return any(
        len(stored.chunks) > 1
        for part in group.parts.values()
        for stored in (part.sources if isinstance(part, Pieced) else (part,))
    )


def prove_output(tensors: Sequence[OutTensor], files: Sequence[FilePlan]) -> None:
    """Our own invariant: no two slots share a byte, and the slots of a tensor tile it. Ranks of a
    mesh may hold the same box, each in its own file."""
    first: dict[Path, tuple[Box, int]] = {}
    boxes: dict[Path, dict[Box, set[int]]] = {}  # of tensors that have more than one slot
    placed = {tensor.path for tensor in tensors if tensor.placement is not None}
    for number, file in enumerate(files):
        end = 0
        for path, box, offset, nbytes in sorted(file.out.slots, key=itemgetter(2)):
            assert offset >= end, f"{file.out.name}: slots overlap at {offset}"
            end = offset + nbytes
            if first.setdefault(path, held := (box, number)) is held:
                continue
            known, at = first[path]
            ranks = boxes.setdefault(path, {known: {at}}).setdefault(box, set())
            again = number in ranks or (ranks and path not in placed)
            assert not again, f"{path}: {box} is written twice"
            ranks.add(number)
        assert end <= file.out.nbytes, f"{file.out.name}: a slot leaves the file"
    tiled: set[tuple[int, int]] = set()  # info and box of tensors of one slot, mostly few
    for path, info, _, alias_of, _, _ in tensors:
        alone = first.get(path)
        if alone is not None and path not in boxes:
            if (alike := (id(info), id(alone[0]))) in tiled:
                continue
            tiled.add(alike)
        if alone is not None or (alias_of is None and info.numel):
            found = boxes.get(path) or alone[:1] if alone is not None else ()
            wrong = prove_tiling(info.shape, list(found))
            assert wrong is None, f"{path}: {wrong}"
