"""The stored tensors of the output, and for each where its bytes come from.

A weight moves as it is stored, or is encoded anew, which can make several stored tensors of it: codes
and scales. A layout says how each is cut into chunks; `file_layout` puts the chunks into files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ckptmap import registry
from ckptmap.checkpoint.cast_tensor import TensorInDtype
from ckptmap.core.columns import each
from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.rearranged_tensors import Assembled
from ckptmap.core.row_chunks import RowChunks
from ckptmap.core.slot_columns import Form, OutTensors
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_columns import Extents
from ckptmap.errors import PlanError
from ckptmap.planning.conversion import Conversion, Steps
from ckptmap.planning.file_plan import Compare, Sources
from ckptmap.planning.kept_codes import code_grid, kept_fidelity
from ckptmap.planning.live_encodings import require_holdable
from ckptmap.planning.output_sharding import OutputSharding
from ckptmap.planning.request import Request
from ckptmap.planning.source_coverage import SourceCoverage
from ckptmap.protocols import Encoding, Refusal, part_key
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Extent, Path, StoredTensor, TensorInfo

UNEQUAL_TIE = (
    "the model's config ties the two, but here they are different weights: write them with a config"
    " that does not (--config-from), or leave the wrong one out with --exclude"
)


NONE_HELD: Mapping[str, StoredTensor] = MappingProxyType({})


@dataclass(frozen=True)
class EncodedTensor:
    """A logical tensor that is encoded anew; `paths[part]` is the stored tensor that holds the part."""

    tensor: LazyTensor
    encoding: Encoding
    paths: Mapping[str, Path]
    fidelity: str
    keeps: CodeGrid | None
    """The codes that are kept bit for bit; None: it is decoded and encoded."""


@dataclass(frozen=True)
class _Target:
    """What all logical tensors of one form become that are encoded alike.

    parts    part -> the stored tensor that holds it
    forms    how each part is cut; None: that depends on the tensor's name
    sources  where the bytes of the parts come from: nowhere yet
    step     how the tensor is converted
    record   its metadata; None: it needs none
    """

    parts: Mapping[str, TensorInfo]
    forms: Sequence[Form] | None
    sources: Sources
    fidelity: str
    keeps: CodeGrid | None
    step: Conversion
    record: Mapping[str, object] | None


@dataclass(frozen=True)
class TensorLayout:
    """All tensors of the output.

    steps    logical tensors, and how each is converted
    tensors  stored tensors, and how each is cut over the ranks
    sources  where the bytes of each stored tensor come from
    numbers  path of a stored tensor -> its number in `tensors` and `sources`
    encoded  logical tensors that are encoded anew
    compares replicas that must hold the same bytes
    keys     path of a stored tensor -> FQN of its logical tensor
    tied     FQN that shares the storage of another -> that one
    records  dotted key of a weight -> how it is encoded, for the output's own metadata
    """

    steps: Steps
    tensors: OutTensors
    sources: Sources
    numbers: Mapping[Path, int]
    encoded: Sequence[EncodedTensor]
    compares: Sequence[Compare]
    keys: Mapping[Path, str]
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
        self._numbers: dict[Path, int] = {}
        self._keys: dict[Path, str] = {}
        self._encoded: list[EncodedTensor] = []
        self._compares: list[Compare] = []
        self._tied: dict[str, str] = {}
        self._records: dict[str, Mapping[str, object]] = {}
        self._first_of_share: dict[object, Path] = {}
        self._targets: dict[tuple[object, ...], _Target] = {}

    def layout(self) -> TensorLayout:
        """Return what was added; nothing may be added after that."""
        return TensorLayout(
            self._steps, self._out, self._sources, self._numbers, self._encoded, self._compares,
            self._keys, self._tied, self._records,
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
            self._encode(lazy, role, path, encoding, held)

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
        fidelity, kind = "bytes" if alike else "exact", _kind(encoding, info)
        self._steps.extend([lazy.fqn], [_step(lazy, "model", kind, fidelity, stored_as.nbytes)])

    def plain(
        self, role: str, fqns: Sequence[str], paths: Sequence[Path],
        infos: Sequence[TensorInfo], extents: Extents,
    ) -> None:  # fmt: skip
        """Add dense tensors, each one run of bytes that moves as it is, as nearly all do."""
        self._coverage.prove_extents(fqns, infos, extents)
        self._store_all(fqns, paths, self._forms(fqns, infos), Sources.at(infos, extents))
        self._steps.extend(fqns, each(infos, lambda info: _unchanged(role, info)))

    def extent(self, path: Path, stored: StoredTensor) -> Extent | None:
        """Return the one run of bytes that holds the tensor.

        None where it lies in several, has replicas, or shares its storage with an earlier tensor
        and the writer can write that.
        """
        place = stored.place
        if type(place) is not Extent or stored.replicas:
            return None
        share = stored.share if self._shares_storage and stored.info.numel else None
        if share is not None and self._first_of_share.setdefault(share, path) != path:
            return None
        return place

    def tie(self, fqn: str, tensor: LazyTensor, written_fqn: str, written: LazyTensor) -> None:
        """Leave out a tied weight, whose bytes must equal those of the weight that is kept."""
        self._tied[fqn] = written_fqn
        self.must_equal(written, tensor, f"{fqn} (tied to {written_fqn})", UNEQUAL_TIE)

    def must_equal(
        self, written: LazyTensor, other: LazyTensor, title: str, hint: str = Compare.hint
    ) -> None:
        """Add the comparison of a tensor that is not written with the one that is."""
        if not (written.parts and other.parts):
            raise PlanError(
                "CKM208",
                f"{title}: is decoded during the conversion, so its stored bytes cannot be compared",
                "leave one of them out with --exclude",
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
            extent = self.extent(path, whole)
            if extent is not None:
                self.plain(role, [lazy.fqn], [path], [whole.info], Extents.of([extent]))
                return
        for part, stored in lazy.parts.items():
            self._store(lazy.fqn, _part_path(lazy.encoding_, path, part), stored.info, stored)
        fidelity = "exact" if any(map(_is_rearranged, lazy.parts.values())) else "bytes"
        self._record(lazy.encoding_, lazy.info, path)
        kind = _kind(lazy.encoding_, lazy.info)
        self._steps.extend([lazy.fqn], [_step(lazy, role, kind, fidelity, lazy.nbytes)])

    def _encode(
        self, lazy: LazyTensor, role: str, path: Path, encoding: Encoding,
        held: Mapping[str, StoredTensor],
    ) -> None:  # fmt: skip
        key, target = (role, id(encoding), *lazy.form), None
        if lazy.form:
            target = self._targets.get(key)
        if target is None:
            target = self._targets[key] = self._target(lazy, role, encoding)
        parts = target.parts
        paths = {part: _part_path(encoding, path, part) for part in parts}
        fqns = [lazy.fqn] * len(parts)
        forms = self._forms(fqns, [*parts.values()]) if target.forms is None else target.forms
        sources = target.sources
        if held:
            sources = Sources.of([held.get(part) for part in parts])
            paths = {part: path for part, path in paths.items() if part not in held}
            for stored in held.values():
                self._compares += self._coverage.prove(lazy.fqn, stored)
        self._store_all(fqns, [_part_path(encoding, path, part) for part in parts], forms, sources)
        self._encoded.append(EncodedTensor(lazy, encoding, paths, target.fidelity, target.keeps))
        if target.record is not None:
            self._records[join(path)] = target.record
        self._steps.extend([lazy.fqn], [target.step])

    def _target(self, lazy: LazyTensor, role: str, encoding: Encoding) -> _Target:
        parts = encoding.parts(lazy.info)
        if isinstance(parts, Refusal):
            raise PlanError(
                "CKM203", f"{lazy.fqn}: cannot be {encoding.name}: {parts.reason}",
                f"leave it as it is with --no-encode '{lazy.fqn}'",
            )  # fmt: skip
        grid = code_grid(lazy)
        kept = kept_fidelity(lazy, encoding, grid)
        fidelity = kept or _fidelity(lazy, encoding, parts)
        infos, n = [*parts.values()], len(parts)
        kind = _kind(encoding, parts[""] if encoding.name == "dense" else lazy.info)
        return _Target(
            parts,
            None if self._sharding.by_name else self._forms([lazy.fqn] * n, infos),
            Sources(infos, [""] * n, [0] * n, [None] * n, [None] * n),
            fidelity,
            grid if kept else None,
            _step(lazy, role, kind, fidelity, sum(info.nbytes for info in infos)),
            encoding.record(lazy.info),
        )

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
        first = len(self._out)
        self._numbers.update(zip(paths, range(first, first + len(paths)), strict=True))
        if len(self._numbers) != first + len(paths):
            twice = Counter([*self._out.paths, *paths]).most_common(1)[0][0]
            fqn = next(f for f, path in zip(fqns, paths, strict=True) if path == twice)
            raise PlanError(
                "CKM114",
                f"{fqn}: {join(twice)} would be written twice",
                "leave one of them out with --exclude",
            )
        _require_text(fqns)
        self._keys.update(zip(paths, fqns, strict=True))
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
        first = self._first_of_share.setdefault(share, path)
        if first == path:
            return None
        self._tied[fqn] = self._keys[first]
        return first


def _unchanged(role: str, info: TensorInfo) -> Conversion:
    nbytes = info.nbytes
    return Conversion(role, info.shape, info.dtype, info.dtype, "bytes", nbytes, nbytes)


def _step(lazy: LazyTensor, role: str, target: str, fidelity: str, nbytes: int) -> Conversion:
    source = _kind(lazy.encoding_, lazy.info)
    if isinstance(lazy, TensorInDtype):  # the cast is a part of the encoding
        source = _kind(lazy.inner.encoding_, lazy.inner.info)
    return Conversion(role, lazy.shape, source, target, fidelity, lazy.nbytes, nbytes)


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
                "leave it out with --exclude, or rename it where it is saved",
            )


def _part_path(encoding: Encoding, path: Path, part: str) -> Path:
    return (*path[:-1], part_key(encoding, str(path[-1]), part)) if part else path


def _kind(encoding: Encoding, info: TensorInfo) -> str:
    return info.dtype if encoding.name == "dense" else f"{encoding.name}({info.dtype})"


def _fidelity(lazy: LazyTensor, encoding: Encoding, parts: Mapping[str, TensorInfo]) -> str:
    if encoding.name != "dense":
        return "requantize" if lazy.quantized else "quantize"
    return "exact" if parts[""].dtype == lazy.dtype and not lazy.lossy else "cast"
