"""Collect every selected tensor in one `TensorLayout`: weights, then optimizer state, then others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from ckptmap.checkpoint.cast_tensor import cast_to
from ckptmap.checkpoint.logical_tensors import DENSE
from ckptmap.core.tensor_columns import Extents
from ckptmap.core.weight_columns import LoneWeight, WeightKind
from ckptmap.planning.kept_codes import code_grid, kept_fidelity
from ckptmap.planning.key_selection import Selection
from ckptmap.planning.layout_builder import LayoutBuilder, TensorLayout
from ckptmap.planning.optimizer_state import OptimizerState
from ckptmap.planning.output_names import OutputNames
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
        weights.add_in_runs()
    for path, tensor, encoding in optimizer.tensors:
        builder.tensor(tensor, "optimizer", path, encoding)
    for kept, other, hint in optimizer.same:
        builder.must_equal(kept, other, f"{kept.fqn} of {other.fqn}", hint)
    if request.setup.holds_extra:
        for path, lazy in selection.others.items():
            builder.tensor(lazy, "other", names.of_extra(path), None)
    return builder.layout()


def _in_its_dtype(lazy: LazyTensor, encoding: Encoding | None) -> LazyTensor:
    """Return the tensor in the dtype of the values that its new encoding takes."""
    if encoding is None or encoding == lazy.encoding_ or not offers(encoding, TakesDtype):
        return lazy
    return cast_to(lazy, encoding.takes)


class _Weight(NamedTuple):
    """A weight that is not encoded anew, and the way that it goes into the output.

    extent  where its bytes are that go along
    """

    fqn: str
    encoding: Encoding | None
    way: Callable[[_Weights, Sequence[_Weight]], None]
    extent: Extent | None = None


class _Weights:
    """The weights of one request, put into a builder."""

    def __init__(
        self, request: Request, sharding: OutputSharding, names: OutputNames,
        selection: Selection, encodings: WeightEncodings, builder: LayoutBuilder,
    ) -> None:  # fmt: skip
        self._request, self._names, self._selection = request, names, selection
        self._encodings, self._builder, self._by_order = encodings, builder, sharding.by_order

    @cached_property
    def _dense(self) -> Mapping[str, StoredTensor]:
        return self._request.ckpt.dense()

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

    def add_in_runs(self) -> None:
        """Add each weight in its order; those that follow each other and go the same way are added together."""
        weights, request = self._selection.weights, self._request
        kinds = request.ckpt.kinds(weights)
        encodings = list(map(self._encodings.anew.get, weights))
        pairs = list(zip(map(id, encodings), map(id, kinds), strict=True))
        rows = dict(zip(pairs, zip(encodings, kinds, strict=True), strict=True))
        is_new = {pair: self._is_new(*row) for pair, row in rows.items()}
        new = list(map(is_new.__getitem__, pairs))
        if self._selection.ties or request.reference is not None:
            new = [
                encoded and fqn not in self._selection.ties and request.reference is None
                for fqn, encoded in zip(weights, new, strict=True)
            ]
        begin = 0
        for encoded, run in groupby(new):
            end = begin + len(list(run))
            some, theirs = weights[begin:end], encodings[begin:end]
            if encoded:
                self._add_encoded(some, kinds[begin:end], theirs)
            else:
                self._add_others(some, theirs)
            begin = end

    def _add_others(self, fqns: Sequence[str], encodings: Sequence[Encoding | None]) -> None:
        run: list[_Weight] = []
        for weight in map(self._weight, fqns, encodings):
            if run and weight.way is not run[0].way:
                self._add_run(run)
                run = []
            run.append(weight)
        self._add_run(run)

    def _weight(self, fqn: str, encoding: Encoding | None) -> _Weight:
        """Return a weight with the way that it goes."""
        if fqn in self._selection.ties or self._request.reference is not None:
            return _Weight(fqn, encoding, _Weights._add_alone)
        if fqn in self._dense:
            stored = self._dense[fqn]
            extent = self._builder.extent(fqn, self._names.of_weight(fqn), stored)
            if extent is not None:
                return _Weight(fqn, encoding, _Weights._add_extents, extent)
        return _Weight(fqn, encoding, _Weights._add_alone)

    def _is_new(self, encoding: Encoding | None, kind: WeightKind) -> bool:
        """Return whether weights of this kind are known to be of another encoding than the new one; None: there
        is no new one."""
        if encoding is None:
            return False
        held = DENSE if isinstance(kind, TensorInfo) else kind.encoding
        return not isinstance(kind, LoneWeight) and encoding != held

    def _add_run(self, run: Sequence[_Weight]) -> None:
        if run:
            run[0].way(self, run)

    def _add_alone(self, run: Sequence[_Weight]) -> None:
        ckpt, ties = self._request.ckpt, self._selection.ties
        for fqn, encoding, *_ in run:
            path = self._names.of_weight(fqn)
            if fqn in ties:
                self._builder.tie(fqn, ckpt[fqn], ties[fqn], ckpt[ties[fqn]])
            elif self._request.reference is not None:
                self._add_like(self._request.reference, fqn, path)
            else:
                self._builder.tensor(_in_its_dtype(ckpt[fqn], encoding), "model", path, encoding)

    def _add_encoded(
        self, fqns: Sequence[str], kinds: Sequence[WeightKind], encodings: Sequence[Encoding | None]
    ) -> None:
        anew = [encoding for encoding in encodings if encoding is not None]
        self._builder.encoded(fqns, self._names.of_weights(fqns), kinds, anew, self._open)

    def _open(self, fqn: str) -> LazyTensor:
        """Return a weight in the dtype of the values that its new encoding takes."""
        return _in_its_dtype(self._request.ckpt[fqn], self._encodings.anew[fqn])

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

    def _add_extents(self, run: Sequence[_Weight]) -> None:
        extents = Extents.of([weight.extent for weight in run if weight.extent is not None])
        fqns = [weight.fqn for weight in run]
        self._add_plain(fqns, [self._dense[fqn].info for fqn in fqns], extents)

    def _add_plain(
        self, fqns: Sequence[str], infos: Sequence[TensorInfo], extents: Extents
    ) -> None:
        self._builder.plain("model", fqns, self._names.of_weights(fqns), infos, extents)
