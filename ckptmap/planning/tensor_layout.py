"""Collect every selected tensor in one `TensorLayout`: weights, then optimizer state, then others."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.checkpoint.cast_tensor import cast_to
from ckptmap.core.tensor_columns import Extents
from ckptmap.planning.kept_codes import code_grid, kept_fidelity
from ckptmap.planning.key_selection import Selection
from ckptmap.planning.layout_builder import LayoutBuilder, TensorLayout
from ckptmap.planning.optimizer_state import OptimizerState
from ckptmap.planning.output_names import OutputNames, require_distinct_keys
from ckptmap.planning.output_sharding import OutputSharding
from ckptmap.planning.reference import Reference
from ckptmap.planning.reference_encodings import activation_parts
from ckptmap.planning.request import Request
from ckptmap.planning.weight_encodings import WeightEncodings
from ckptmap.protocols import Encoding
from ckptmap.protocols.encodings import TakesDtype
from ckptmap.protocols.offers import offers
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Extent, Path, StoredTensor, TensorInfo


def tensor_layout(
    request: Request,
    sharding: OutputSharding,
    names: OutputNames,
    selection: Selection,
    encodings: WeightEncodings,
    optimizer: OptimizerState,
) -> TensorLayout:
    """Return the stored tensors of the output. Raises SourceError and PlanError as `LayoutBuilder`."""
    builder = LayoutBuilder(request, sharding)
    weights = _Weights(request, sharding, names, selection, encodings, builder)
    if not weights.add_in_columns():
        weights.add_one_by_one()
    for path, tensor, encoding in optimizer.tensors:
        builder.tensor(tensor, "optimizer", path, encoding)
    for kept, other, hint in optimizer.same:
        builder.must_equal(kept, other, f"{kept.fqn} of {other.fqn}", hint)
    if request.setup.holds_extra:
        for path, lazy in selection.others.items():
            builder.tensor(lazy, "other", names.of_extra(path), None)
    layout = builder.layout()
    require_distinct_keys(layout.tensors.paths)
    return layout


def _in_its_dtype(lazy: LazyTensor, encoding: Encoding | None) -> LazyTensor:
    """Return the tensor in the dtype of the values that its new encoding takes."""
    if encoding is None or encoding == lazy.encoding_ or not offers(encoding, TakesDtype):
        return lazy
    return cast_to(lazy, encoding.takes)


class _Weights:
    """The weights of one request, put into a builder."""

    def __init__(
        self, request: Request, sharding: OutputSharding, names: OutputNames,
        selection: Selection, encodings: WeightEncodings, builder: LayoutBuilder,
    ) -> None:  # fmt: skip
        self._request, self._names, self._selection = request, names, selection
        self._encodings, self._builder, self._by_order = encodings, builder, sharding.by_order

    def add_in_columns(self) -> bool:
        """Add all weights at once where all go along as they are; return whether they do."""
        request, columns = self._request, self._request.ckpt.columns()
        if columns is None or self._selection.ties or self._by_order or request.reference:
            return False
        if request.aim.scheme is not None or not request.takes_all or self._encodings.anew:
            return False
        extents = columns.extents()
        if extents is None:
            return False
        self._add_plain(columns.names, columns.infos, extents)
        return True

    def add_one_by_one(self) -> None:
        """Add each weight in its order; plain ones that follow each other are added together."""
        ckpt, ties = self._request.ckpt, self._selection.ties
        request = self._request
        dense = {} if request.aim.scheme or request.reference else ckpt.dense()
        plain: list[tuple[str, TensorInfo, Extent]] = []
        for fqn in self._selection.weights:
            path, extent = self._names.of_weight(fqn), None
            if fqn in dense and fqn not in ties and fqn not in self._encodings.anew:
                extent = self._builder.extent(path, dense[fqn])
            if extent is not None:
                plain.append((fqn, dense[fqn].info, extent))
                continue
            self._add_run(plain)
            plain = []
            if fqn in ties:
                self._builder.tie(fqn, ckpt[fqn], ties[fqn], ckpt[ties[fqn]])
            elif request.reference is not None:
                self._add_like(request.reference, fqn, path)
            else:
                encoding = self._encodings.anew.get(fqn)
                self._builder.tensor(_in_its_dtype(ckpt[fqn], encoding), "model", path, encoding)
        self._add_run(plain)

    def _add_like(self, reference: Reference, fqn: str, path: Path) -> None:
        """Add a weight as the checkpoint of --as has it."""
        mine, theirs = self._request.ckpt[fqn], reference.ckpt[fqn]
        encoding = self._encodings.anew.get(fqn)
        if reference.keeps(fqn):
            self._builder.returned(mine, theirs, path)
            return
        held: dict[str, StoredTensor] = {}
        if encoding is not None and encoding.name != "dense":
            names = activation_parts(encoding, theirs.parts, fqn)
            held = {part: theirs.parts[part] for part in names}
            if kept_fidelity(mine, encoding, code_grid(mine)) is None:
                mine = cast_to(mine, theirs.dtype)
        self._builder.tensor(mine, "model", path, encoding, held)

    def _add_run(self, plain: Sequence[tuple[str, TensorInfo, Extent]]) -> None:
        if plain:
            fqns, infos, extents = zip(*plain, strict=True)
            self._add_plain(fqns, infos, Extents.of(extents))

    def _add_plain(
        self, fqns: Sequence[str], infos: Sequence[TensorInfo], extents: Extents
    ) -> None:
        root = self._names.root
        paths: list[Path] = [(self._names.weights[fqn],) for fqn in fqns]
        if root:
            paths = [root + path for path in paths]
        self._builder.plain("model", fqns, paths, infos, extents)
