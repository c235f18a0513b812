"""The stored tensors of the output, and for each where its bytes come from.

A weight moves as it is stored, or is encoded anew, which can make several stored tensors of it: codes
and scales. A layout says how each is cut into chunks; `file_layout` puts the chunks into files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from ckptmap import registry
from ckptmap.core.columns import NamedRows, distinct, each
from ckptmap.core.printable import advised
from ckptmap.core.rearranged_tensors import Assembled
from ckptmap.core.row_chunks import RowChunks
from ckptmap.core.slot_columns import Form, OutTensors
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_columns import Extents
from ckptmap.core.weight_columns import WeightKind
from ckptmap.errors import PlanError
from ckptmap.planning.conversion import Conversion, Steps
from ckptmap.planning.encoding_targets import (
    EncodingTarget,
    conversion,
    kind_of,
    parts_of,
    target_of,
)
from ckptmap.planning.file_plan import Compare, EncodedTensors, EncodeForm, Sources
from ckptmap.planning.live_encodings import require_holdable
from ckptmap.planning.output_names import require_distinct_keys
from ckptmap.planning.output_sharding import OutputSharding
from ckptmap.planning.request import Request
from ckptmap.planning.source_coverage import SourceCoverage
from ckptmap.protocols import Encoding, part_key
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Extent, Path, StoredTensor, TensorInfo

UNEQUAL_TIE = (
    "the model's config ties the two, but here they are different weights: write them with a config"
    " that does not (--config-from PATH), or leave the wrong one out: {} or {}"
)


NONE_HELD: Mapping[str, StoredTensor] = MappingProxyType({})


@dataclass(frozen=True)
class TensorLayout:
    """All tensors of the output.

    steps    logical tensors, and how each is converted
    tensors  stored tensors, and how each is cut over the ranks
    sources  where the bytes of each stored tensor come from
    encoded  logical tensors that are encoded anew
    compares replicas that must hold the same bytes
    keys     path of a stored tensor -> FQN of its logical tensor; in the order of `tensors` and `sources`
    tied     FQN that shares the storage of another -> that one
    records  dotted key of a weight -> how it is encoded, for the output's own metadata
    """

    steps: Steps
    tensors: OutTensors
    sources: Sources
    encoded: EncodedTensors
    compares: Sequence[Compare]
    keys: NamedRows[Path, str]
    tied: Mapping[str, str]
    records: Mapping[str, Mapping[str, object]]


class LayoutBuilder:
    """Makes a `TensorLayout`, tensor by tensor; most come in columns (`plain`)."""

    def __init__(self, request: Request, sharding: OutputSharding) -> None:
        self._setup, self._sharding = request.setup, sharding
        self._coverage = SourceCoverage(request.ckpt.path, request.fingerprints)
        self._shares_storage = registry.writer(request.setup.writer).shares_storage
        self._steps = Steps([], [])
        self._out = OutTensors([], [])
        self._sources = Sources([], [], [], [], [])
        self._fqns: list[str] = []
        self._encoded = EncodedTensors([], [], [])
        self._compares: list[Compare] = []
        self._tied: dict[str, str] = {}
        self._records: dict[str, Mapping[str, object]] = {}
        self._first_of_share: dict[object, tuple[Path, str]] = {}
        self._targets: dict[tuple[object, ...], EncodingTarget] = {}

    def layout(self) -> TensorLayout:
        """Return what was added; nothing may be added after that.

        Raises PlanError CKM114 where two tensors have one path, or one key.
        """
        require_distinct_keys(self._out.paths, self._fqns)
        return TensorLayout(
            self._steps, self._out, self._sources, self._encoded, self._compares,
            NamedRows(self._out.paths, self._fqns), self._tied, self._records,
        )  # fmt: skip

    # ------------------------------------------------------------------ logical tensors

    def tensor(
        self, lazy: LazyTensor, role: str, path: Path, encoding: Encoding | None,
        held: Mapping[str, StoredTensor] = NONE_HELD,
    ) -> None:  # fmt: skip
        """Add a tensor; `encoding` None: it is stored as it is. Of a new encoding the parts `held` are
        copied, and the others encoded.

        Raises PlanError CKM203 or CKM317 where the setup cannot hold it, SourceError CKM104 or
        CKM112 where the source does not hold all of it.
        """
        self._require_holdable(lazy, encoding)
        for stored in lazy.beneath:
            self._compares += self._coverage.prove(lazy.fqn, stored)
        if encoding is None or encoding == lazy.encoding_:
            self._copy(lazy, role, path)
        else:
            target = self._target(lazy, role, encoding)
            self._encode([lazy.fqn], [path], [target], lambda fqn: lazy, held)

    def encoded(
        self, fqns: Sequence[str], paths: Sequence[Path], kinds: Sequence[WeightKind],
        encodings: Sequence[Encoding], open: Callable[[str], LazyTensor],
    ) -> None:  # fmt: skip
        """Add weights that are encoded anew; `open` returns one of them, in the dtype that its encoding takes.

        Raises as `tensor` does.
        """
        keys = list(zip(map(id, kinds), map(id, encodings), strict=True))
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        targets: dict[tuple[int, int], EncodingTarget] = {}
        for at in sorted(first.values()):
            lazy = open(fqns[at])
            self._require_holdable(lazy, encodings[at])
            targets[keys[at]] = self._target(lazy, "model", encodings[at])
        self._compares += self._coverage.prove_all(fqns, kinds, lambda fqn: open(fqn).beneath)
        self._encode(fqns, paths, list(map(targets.__getitem__, keys)), open, NONE_HELD)

    def returned(self, lazy: LazyTensor, stored_as: LazyTensor, path: Path) -> None:
        """Add a weight as the stored parts of another tensor, which has its values bit for bit.

        Raises as `tensor` does.
        """
        encoding, info = stored_as.encoding_, stored_as.info
        self._require_holdable(stored_as, None)
        for stored in (*lazy.beneath, *stored_as.beneath):
            self._compares += self._coverage.prove(lazy.fqn, stored)
        for part, stored in stored_as.parts.items():
            self._store(lazy.fqn, _part_path(encoding, path, part), stored.info, _of_other(stored))
        self._record(encoding, info, path)
        alike = lazy.encoding_ == encoding and lazy.info == info
        fidelity, kind = "bytes" if alike else "exact", kind_of(encoding, info)
        self._steps.extend(
            [lazy.fqn], [conversion(lazy, "model", kind, fidelity, stored_as.nbytes)]
        )

    def plain(
        self, role: str, fqns: Sequence[str], paths: Sequence[Path],
        infos: Sequence[TensorInfo], extents: Extents,
    ) -> None:  # fmt: skip
        """Add dense tensors, each one run of bytes that moves as it is, as nearly all do."""
        self._coverage.prove_extents(fqns, infos, extents)
        self._store_all(fqns, paths, self._forms(fqns, infos), Sources.at(infos, extents))
        self._steps.extend(fqns, each(infos, lambda info: _unchanged(role, info)))

    def extent(self, fqn: str, path: Path, stored: StoredTensor) -> Extent | None:
        """Return the one run of bytes that holds the tensor.

        None where it lies in several, has replicas, or shares its storage with an earlier tensor
        and the writer can write that.
        """
        place = stored.place
        if type(place) is not Extent or stored.replicas:
            return None
        share = stored.share if self._shares_storage and stored.info.numel else None
        if share is not None and self._first_of_share.setdefault(share, (path, fqn))[0] != path:
            return None
        return place

    def tie(self, fqn: str, tensor: LazyTensor, written_fqn: str, written: LazyTensor) -> None:
        """Leave out a tied weight, whose bytes must equal those of the weight that is kept."""
        self._tied[fqn] = written_fqn
        hint = UNEQUAL_TIE.format(advised(exclude=fqn), advised(exclude=written_fqn))
        self.must_equal(written, tensor, f"{fqn} (tied to {written_fqn})", hint)

    def must_equal(self, written: LazyTensor, other: LazyTensor, title: str, hint: str) -> None:
        """Add the comparison of a tensor that is not written with the one that is."""
        if not (written.parts and other.parts):
            raise PlanError(
                "CKM208",
                f"{title}: is decoded during the conversion, so its stored bytes cannot be compared",
                f"leave one of them out with {advised(exclude=other.fqn)}",
            )
        for part, stored in other.parts.items():
            self._compares += self._coverage.prove(other.fqn, stored)
            written_part = written.parts[part]
            self._compares += [Compare(title, written_part, chunk, hint) for chunk in stored.chunks]

    def _require_holdable(self, lazy: LazyTensor, encoding: Encoding | None) -> None:
        name = (encoding or lazy.encoding_).name
        require_holdable(lazy.fqn, self._setup, name)
        if self._setup.dense and name != "dense":
            setup, other = self._setup.name, "fsdp2" if encoding is None else f"fsdp2-{name}"
            raise PlanError(
                "CKM203",
                f"{lazy.fqn}: would be {name}, but {setup} holds dense tensors only: its loader knows"
                " no codes with scales",
                f"decode it, for example --to {setup}-bf16, or choose {other}",
            )

    def _copy(self, lazy: LazyTensor, role: str, path: Path) -> None:
        whole = lazy.parts.get("") if len(lazy.parts) == 1 else None
        if whole is not None and lazy.encoding_.name == "dense":
            extent = self.extent(lazy.fqn, path, whole)
            if extent is not None:
                self.plain(role, [lazy.fqn], [path], [whole.info], Extents.of([extent]))
                return
        for part, stored in lazy.parts.items():
            self._store(lazy.fqn, _part_path(lazy.encoding_, path, part), stored.info, stored)
        fidelity = "exact" if any(map(_is_rearranged, lazy.parts.values())) else "bytes"
        self._record(lazy.encoding_, lazy.info, path)
        kind = kind_of(lazy.encoding_, lazy.info)
        self._steps.extend([lazy.fqn], [conversion(lazy, role, kind, fidelity, lazy.nbytes)])

    def _encode(
        self, fqns: Sequence[str], paths: Sequence[Path], targets: Sequence[EncodingTarget],
        open: Callable[[str], LazyTensor], held: Mapping[str, StoredTensor],
    ) -> None:  # fmt: skip
        """Add tensors that become these targets; of one tensor alone the parts `held` are copied."""
        for stored in held.values():
            self._compares += self._coverage.prove(fqns[0], stored)
        kinds = distinct(targets).values()
        counts = each(targets, lambda target: len(target.parts))
        first, names, keys = len(self._out), fqns, paths
        if any(target.parts.keys() != {""} for target in kinds):
            names = [fqn for fqn, n in zip(fqns, counts, strict=True) for _ in range(n)]
            keys = [
                _part_path(target.encoding, path, part)
                for path, target in zip(paths, targets, strict=True)
                for part in target.parts
            ]
        infos = [info for target in targets for info in target.parts.values()]
        forms = [form for target in targets for form in target.forms or ()]
        if not forms:
            forms = self._forms(names, infos)
        parts = [held.get(part) for part in targets[0].parts] if held else [None] * len(infos)
        self._store_all(names, keys, forms, Sources.of(parts) if held else Sources.none(infos))
        encoded = each(targets, lambda target: _encode_form(target, open, held))
        firsts = accumulate(counts[:-1], initial=first)
        self._encoded.extend(fqns, encoded, firsts)
        if any(target.record is not None for target in kinds):
            for path, target in zip(paths, targets, strict=True):
                if target.record is not None:
                    self._records[join(path)] = target.record
        self._steps.extend(fqns, [target.step for target in targets])

    def _target(self, lazy: LazyTensor, role: str, encoding: Encoding) -> EncodingTarget:
        key = (role, id(encoding), *lazy.form)
        if lazy.form and key in self._targets:
            return self._targets[key]
        parts, forms = parts_of(lazy, encoding), None
        if not self._sharding.by_name:
            forms = self._forms([lazy.fqn] * len(parts), [*parts.values()])
        target = target_of(lazy, role, encoding, parts, forms)
        if lazy.form:
            self._targets[key] = target
        return target

    def _record(self, encoding: Encoding, info: TensorInfo, path: Path) -> None:
        record = encoding.record(info)
        if record is not None:
            self._records[join(path)] = record

    # ------------------------------------------------------------------ stored tensors

    def _store(self, fqn: str, path: Path, info: TensorInfo, stored: StoredTensor) -> None:
        place = stored.place
        if type(place) is Extent:
            source = Sources.at([info], Extents.of([place]))
        else:
            source = Sources([info], [""], [0], [None], [stored])
        form = self._form(fqn, info, self._alias(fqn, path, stored))
        self._store_all([fqn], [path], [form], source)

    def _store_all(
        self, fqns: Sequence[str], paths: Sequence[Path], forms: Sequence[Form], sources: Sources
    ) -> None:
        _require_text(fqns)
        self._fqns += fqns
        self._out.extend(paths, forms)
        self._sources.extend(*sources.columns())

    def _forms(self, fqns: Sequence[str], infos: Sequence[TensorInfo]) -> list[Form]:
        """Return how each tensor is cut: one object for all that are cut alike."""
        if self._sharding.by_name:
            return [self._form(fqn, info, None) for fqn, info in zip(fqns, infos, strict=True)]
        return each(infos, lambda info: self._form("", info, None))

    def _form(self, fqn: str, info: TensorInfo, alias: Path | None) -> Form:
        chunks, placement = self._sharding.cut(fqn, info)
        return Form(info, chunks, alias, placement, self._sharding.unit(fqn, info))

    def _alias(self, fqn: str, path: Path, stored: StoredTensor | None) -> Path | None:
        """Return the path of the earlier tensor whose storage this one shares in the source, if the
        writer can share it."""
        share = stored.share if stored is not None and stored.info.numel else None
        if share is None or not self._shares_storage:
            return None
        first, written = self._first_of_share.setdefault(share, (path, fqn))
        if first == path:
            return None
        self._tied[fqn] = written
        return first


def _unchanged(role: str, info: TensorInfo) -> Conversion:
    nbytes = info.nbytes
    return Conversion(role, info.shape, info.dtype, info.dtype, "bytes", nbytes, nbytes)


def _of_other(stored: StoredTensor) -> StoredTensor:
    """Return a stored tensor of another checkpoint, whose storages are none of the source's."""
    if stored.share is None:
        return stored
    share = ("reference", stored.share)
    return StoredTensor(stored.info, lambda: stored.place, stored.replicas, share)


def _is_rearranged(stored: StoredTensor) -> bool:
    """Return whether the bytes are written in another order than they are stored in."""
    if isinstance(stored, Assembled):
        return True
    if type(stored.place) in (Extent, RowChunks):
        return False
    return not all(chunk.region.is_contiguous for chunk in stored.chunks)


def _require_text(fqns: Sequence[str]) -> None:
    """Raise PlanError CKM202 for a name with a lone surrogate, which no file format can hold."""
    if "".join(fqns).isascii():
        return
    for fqn in fqns:
        if any("\ud800" <= char <= "\udfff" for char in fqn):
            raise PlanError(
                "CKM202",
                f"{fqn!r}: half a character in the name (a lone surrogate), which no file can hold",
                f"leave it out with {advised(exclude=fqn)}, or rename it where it is saved",
            )


def _part_path(encoding: Encoding, path: Path, part: str) -> Path:
    return (*path[:-1], part_key(encoding, str(path[-1]), part)) if part else path


def _encode_form(
    target: EncodingTarget, open: Callable[[str], LazyTensor], held: Collection[str]
) -> EncodeForm:
    parts = [(part, at) for at, part in enumerate(target.parts) if part not in held]
    return EncodeForm(open, target.encoding, parts, target.fidelity, target.keeps)
