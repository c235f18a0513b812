"""The way of one tensor into the output: as bytes or encoded anew, every byte accounted for.

A draft gathers them; when all are in, the writer places every chunk, and each placed byte is traced
to a source region or to an encoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import add
from typing import Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.roles import EXTRA_KEY
from ckptmap.core.columns import each
from ckptmap.core.row_chunks import Rows
from ckptmap.core.slot_columns import Form, OutTensors, Slots
from ckptmap.core.state_paths import counts, join, nest
from ckptmap.core.tensor_columns import Extents, nbytes_of
from ckptmap.core.tiling import prove_rows, prove_tiling
from ckptmap.core.woven import Pieced
from ckptmap.errors import PlanError, SourceError
from ckptmap.planning.conversion import Conversion, Steps
from ckptmap.planning.file_plan import Compare, Encode, FilePlan, SlotRef, Sources
from ckptmap.planning.kept_codes import code_grid, kept_fidelity
from ckptmap.planning.live_encodings import refuse_unheld
from ckptmap.planning.output_sharding import OutputSharding, prove_output
from ckptmap.planning.plan import Unresolved
from ckptmap.protocols import Encoding, OutState, OutTensor, Refusal, Setup, Writer, part_key
from ckptmap.storage.files import Fingerprint
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Extent, Path, StoredTensor, TensorInfo


@dataclass
class LayoutBuilder:
    """What planning gathers, tensor by tensor."""

    ckpt: Checkpoint
    setup: Setup
    writer: Writer
    cutter: OutputSharding
    fingerprints: Mapping[str, Fingerprint]
    steps: Steps = field(default_factory=lambda: Steps([], []))
    out: OutTensors = field(default_factory=lambda: OutTensors([], []))
    sources: Sources = field(default_factory=lambda: Sources([], [], [], [], []))
    """Where the bytes of each tensor of `out` come from."""
    numbers: dict[Path, int] = field(default_factory=dict)
    """Path of an output tensor -> its number in `out` and `sources`."""
    keys: dict[Path, str] = field(default_factory=dict)
    encodes: list[tuple[Encode, dict[str, Path]]] = field(default_factory=list)
    """Without targets yet, and the path of each part."""
    compares: list[Compare] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unresolved: list[Unresolved] = field(default_factory=list)
    records: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    extra: dict[Path, Any] = field(default_factory=dict)
    shared: dict[object, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    proven: dict[int, StoredTensor] = field(default_factory=dict)
    """Tensors that others are pieced together of, each looked at once."""

    # ------------------------------------------------------------------ one tensor

    def tensor(self, lazy: LazyTensor, role: str, path: Path, encoding: Encoding | None) -> None:
        self._check_dense(lazy, encoding)
        for stored in lazy.beneath:
            self._prove(lazy.fqn, stored)
        if encoding is None or (encoding == lazy.encoding_):
            self._copy(lazy, role, path)
        else:
            self._encode(lazy, role, path, encoding)

    def plain(
        self, role: str, fqns: Sequence[str], paths: Sequence[Path],
        infos: Sequence[TensorInfo], located: Extents,
    ) -> None:  # fmt: skip
        """Dense tensors, each one run of bytes that moves as it is, as nearly all do."""
        ends = list(map(add, located.offsets, nbytes_of(infos)))
        self._prove_ends(fqns, located.files, ends)
        self._place_all(fqns, paths, infos, Sources.at(infos, located))
        self.steps.extend(fqns, each(infos, lambda info: _as_it_is(role, info)))

    def _prove_ends(self, fqns: Sequence[str], files: Sequence[str], ends: Sequence[int]) -> None:
        """Every tensor lies inside of its file."""
        limits = {file: self.fingerprints[file].nbytes for file in set(files)}
        if len(limits) == 1 and max(ends) <= limits[files[0]]:
            return
        for fqn, file, end in zip(fqns, files, ends, strict=True):
            if end > limits[file]:
                raise self._past_the_end(fqn, file, end)

    def _check_dense(self, lazy: LazyTensor, encoding: Encoding | None) -> None:
        name = (encoding or lazy.encoding_).name
        refuse_unheld(lazy.fqn, self.setup, name)
        if self.setup.dense and name != "dense":
            setup, way = self.setup.name, "fsdp2" if encoding is None else f"fsdp2-{name}"
            raise PlanError(
                "CKM203",
                f"{lazy.fqn}: would be {name}, {setup} holds dense tensors only: what loads it knows"
                " no payloads with scales",
                f"decode it, for example --to {setup}-bf16, or choose {way}",
            )

    def _prove(self, fqn: str, stored: StoredTensor) -> None:
        """Chunks tile the tensor, every region lies inside its file; replicas will be compared."""
        if isinstance(stored, Pieced):  # its pieces tile it: that is proven where it was mapped
            for source in stored.sources:
                if id(source) not in self.proven:
                    self.proven[id(source)] = source
                    self._prove(fqn, source)
            return
        place = stored.place
        if type(place) is Extent and not stored.replicas:
            if place.offset + stored.info.nbytes > self.fingerprints[place.file].nbytes:
                raise self._past_the_end(fqn, place.file, place.offset + stored.info.nbytes)
            return
        rows = place if type(place) is Rows else None
        if rows is not None:
            wrong = prove_rows(stored.info.shape, tuple(rows.bounds))
        else:
            wrong = prove_tiling(stored.info.shape, [chunk.box for chunk in stored.chunks])
        if wrong is not None:
            raise SourceError(
                "CKM112", f"{self.ckpt.path}: {fqn}: {wrong}, expected to fill {stored.info}",
                "a rank's file may be missing or from another run; save it again",
            )  # fmt: skip
        chunks = stored.replicas if rows is not None else (*stored.chunks, *stored.replicas)
        ends = [(c.region.file, c.region.offset + c.region.span_nbytes) for c in chunks]
        for file, end in (*ends, *(rows.ends() if rows is not None else ())):
            if end > self.fingerprints[file].nbytes:
                raise self._past_the_end(fqn, file, end)
        self.compares += [Compare(fqn, stored, replica) for replica in stored.replicas]

    def _past_the_end(self, fqn: str, file: str, end: int) -> SourceError:
        limit = self.fingerprints[file].nbytes
        return SourceError(
            "CKM104",
            f"{file}: {fqn} ends at byte {end}, the file at {limit}",
            "it is truncated; copy it again",
        )

    def _copy(self, lazy: LazyTensor, role: str, path: Path) -> None:
        plain = lazy.parts.get("") if len(lazy.parts) == 1 else None
        if plain is not None and lazy.encoding_.name == "dense":
            place = self.alone(path, plain)
            if place is not None:
                self.plain(role, [lazy.fqn], [path], [plain.info], Extents.of([place]))
                return
        rearranged = False
        for part, stored in lazy.parts.items():
            self._place(lazy.fqn, _part_path(lazy.encoding_, path, part), stored.info, stored)
            if isinstance(stored, Pieced):
                rearranged = True
            elif type(stored.place) not in (Extent, Rows):
                for chunk in stored.chunks:
                    rearranged = rearranged or not chunk.region.is_contiguous
        self._record(lazy.encoding_, lazy.info, path)
        kind = _kind(lazy.encoding_, lazy.info)
        self._step(lazy, role, kind, "exact" if rearranged else "bytes", lazy.nbytes)

    def _encode(self, lazy: LazyTensor, role: str, path: Path, encoding: Encoding) -> None:
        parts = encoding.parts(lazy.info)
        if isinstance(parts, Refusal):
            raise PlanError(
                "CKM203", f"{lazy.fqn}: cannot be {encoding.name}: {parts.reason}",
                f"leave it as it is with --no-encode '{lazy.fqn}'",
            )  # fmt: skip
        for part, info in parts.items():
            self._place(lazy.fqn, _part_path(encoding, path, part), info, None)
        grid = code_grid(lazy)
        kept = kept_fidelity(lazy, encoding, grid)
        fidelity = kept or _fidelity(lazy, encoding, parts)
        paths = {part: _part_path(encoding, path, part) for part in parts}
        self.encodes.append((Encode(lazy, encoding, {}, fidelity, grid if kept else None), paths))
        self._record(encoding, lazy.info, path)
        out = parts[""] if encoding.name == "dense" else lazy.info
        self._step(
            lazy, role, _kind(encoding, out), fidelity, sum(p.nbytes for p in parts.values())
        )

    def alone(self, path: Path, stored: StoredTensor) -> Extent | None:
        """Its one run of bytes; None: it lies otherwise, has replicas, or is a tie that the writer
        knows."""
        place = stored.place
        if type(place) is not Extent or stored.replicas:
            return None
        share = stored.share if self.writer.shares_storage and stored.info.numel else None
        if share is not None and self.shared.setdefault(share, path) is not path:
            return None
        return place

    def _place(self, fqn: str, path: Path, info: TensorInfo, stored: StoredTensor | None) -> None:
        """One tensor: as it is stored, or to be encoded."""
        place = None if stored is None else stored.place
        if type(place) is Extent:
            source = Sources.at([info], Extents.of([place]))
        else:
            source = Sources([info], [""], [0], [None], [stored])
        alias = self._alias(fqn, path, stored) if self.writer.shares_storage else None
        self._place_all([fqn], [path], [info], source, alias)

    def _place_all(
        self,
        fqns: Sequence[str],
        paths: Sequence[Path],
        infos: Sequence[TensorInfo],
        sources: Sources,
        alias: Path | None = None,
    ) -> None:
        first = len(self.out)
        self.numbers.update(zip(paths, range(first, first + len(paths)), strict=True))
        if len(self.numbers) != first + len(paths):
            twice = Counter([*self.out.paths, *paths]).most_common(1)[0][0]
            fqn = next(f for f, path in zip(fqns, paths, strict=True) if path == twice)
            raise PlanError(
                "CKM114", f"{fqn}: {join(twice)} would be written twice", "use --exclude"
            )
        _require_text(fqns)
        self.keys.update(zip(paths, fqns, strict=True))
        self.out.extend(paths, self._forms(fqns, infos, alias))
        self.sources.extend(*sources.columns())

    def _forms(
        self, fqns: Sequence[str], infos: Sequence[TensorInfo], alias: Path | None
    ) -> list[Form]:
        """How each is cut; one for all that are cut alike."""
        cutter = self.cutter
        if cutter.by_name or len(fqns) == 1:
            return [self._form(fqn, info, alias) for fqn, info in zip(fqns, infos, strict=True)]
        return each(infos, lambda info: self._form("", info, alias))

    def _form(self, fqn: str, info: TensorInfo, alias: Path | None) -> Form:
        chunks, placement = self.cutter.cut(fqn, info)
        return Form(info, chunks, alias, placement, self.cutter.unit(fqn, info))

    def _alias(self, fqn: str, path: Path, stored: StoredTensor | None) -> Path | None:
        """The earlier path whose storage this tensor shares, where the source says so."""
        if stored is None:
            return None
        share = stored.share
        if share is None or not stored.info.numel:
            return None
        first = self.shared.setdefault(share, path)
        if first is path:
            return None
        self.tied[fqn] = self.keys[first]
        return first

    def _record(self, encoding: Encoding, info: TensorInfo, path: Path) -> None:
        record = encoding.record(info)
        if record is not None:
            self.records[join(path)] = record

    def _step(self, lazy: LazyTensor, role: str, target: str, fidelity: str, nbytes: int) -> None:
        source = _kind(lazy.encoding_, lazy.info)
        kind = Conversion(role, lazy.shape, source, target, fidelity, lazy.nbytes, nbytes)
        self.steps.extend([lazy.fqn], [kind])

    def must_equal(
        self, kept: LazyTensor, other: LazyTensor, title: str, hint: str = Compare.hint
    ) -> None:
        """The other is not written, so its bytes must be those of the kept tensor."""
        if not (kept.parts and other.parts):
            raise PlanError(
                "CKM208",
                f"{title}: is decoded on the way, so it cannot be compared as it is stored",
                "leave one of them out with --exclude",
            )
        for part, stored in other.parts.items():
            self._prove(other.fqn, stored)
            whole = kept.parts[part]
            self.compares += [Compare(title, whole, chunk, hint) for chunk in stored.chunks]

    # ------------------------------------------------------------------ the whole

    def placed(
        self, max_shard_nbytes: int, stem: str | None = None
    ) -> tuple[list[FilePlan], list[Encode]]:
        """Every file with the source of each slot, and what is to be encoded into which slots."""
        state = OutState(
            self.out, _writable(self.extra, self.out), self.records, self.cutter.world_size,
            max_shard_nbytes, stem,
        )  # fmt: skip
        targets: dict[Path, list[SlotRef]] = {}
        files = []
        for number, out in enumerate(self.writer.files(state, "archive")):
            slots = Slots.of(out.slots)
            sources = self._sources(slots)
            files.append(FilePlan(out, sources))
            for index in range(len(slots)) if self.encodes else ():
                if not sources.is_copied(index):
                    targets.setdefault(slots.paths[index], []).append(SlotRef(number, index))
        prove_output(self.out, files)
        encodes = []
        for step, paths in self.encodes:
            tiles = {p: _in_order(targets.get(path, ()), files) for p, path in paths.items()}
            encodes.append(replace(step, targets=tiles))
        return files, encodes

    def _sources(self, slots: Slots) -> Sources:
        """Return where the bytes of each slot come from."""
        numbers = list(map(self.numbers.__getitem__, slots.paths))
        sources, infos = self.sources.take(numbers), [self.out.forms[n].info for n in numbers]
        if nbytes_of(infos) == list(slots.sizes):
            return sources
        # A slot that is a part of its tensor is no extent: its box is found in the whole tensor.
        others, files = list(sources.others), list(sources.files)
        for index, (info, nbytes) in enumerate(zip(infos, slots.sizes, strict=True)):
            if nbytes != info.nbytes and files[index]:
                others[index], files[index] = sources[index], ""
        return replace(sources, others=others, files=files)


def _as_it_is(role: str, info: TensorInfo) -> Conversion:
    nbytes = info.nbytes
    return Conversion(role, info.shape, info.dtype, info.dtype, "bytes", nbytes, nbytes)


def _require_text(fqns: Sequence[str]) -> None:
    """Raises PlanError CKM202 for a name with a lone surrogate in it."""
    if "".join(fqns).isascii():
        return
    for fqn in fqns:
        if any("\ud800" <= char <= "\udfff" for char in fqn):
            raise PlanError(
                "CKM202",
                f"{fqn!r}: a name with half a character in it (a lone surrogate), no file holds that",
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


def _in_order(targets: Iterable[SlotRef], files: Sequence[FilePlan]) -> tuple[SlotRef, ...]:
    return tuple(sorted(targets, key=lambda t: files[t.file].out.slots[t.slot].box.offsets))


def _writable(extra: Mapping[Path, Any], tensors: Iterable[OutTensor]) -> dict[Path, Any]:
    """Plain values by path; a dict of integer keys is one value, for a DCP path cannot say that an
    integer is one. Where it holds tensors as well, its leaves stay as they are, and so does what
    lies in `extra` itself: there a DCP directory knows the integer by its text."""
    roots = set[Path]()
    for path in extra:
        counting = (at for at, s in enumerate(path) if counts(s) and path[:at] != (EXTRA_KEY,))
        roots.update(path[:at] for at in islice(counting, 1))
    if not roots:
        return dict(extra)
    for tensor in tensors:
        roots -= {tensor.path[:depth] for depth in range(len(tensor.path))}
    whole: dict[Path, Any] = {}
    dicts: dict[Path, dict[Path, Any]] = {}
    for path, value in extra.items():
        at = next((path[:depth] for depth in range(len(path)) if path[:depth] in roots), None)
        if at is None:
            whole[path] = value
        else:
            whole.setdefault(at)
            dicts.setdefault(at, {})[("dict", *path[len(at) :])] = value
    return whole | {path: nest(values)["dict"] for path, values in dicts.items()}
