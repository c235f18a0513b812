"""The way of one tensor into the output: as bytes or encoded anew, every byte accounted for.

A draft gathers them; when all are in, the writer places every chunk, and each placed byte is traced
to a source region or to an encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptmap.checkpoint import Checkpoint
from ckptmap.coverage import prove_rows, prove_tiling
from ckptmap.cutting import Cutter, prove_output
from ckptmap.errors import PlanError, SourceError
from ckptmap.files import Fingerprint
from ckptmap.grids import Grid
from ckptmap.holding import refuse_unheld
from ckptmap.lazy import LazyTensor
from ckptmap.leaves import counts, join, nest
from ckptmap.plans import Step, Unresolved
from ckptmap.protocols import (
    Encoding,
    OutState,
    OutTensor,
    Refusal,
    Setup,
    Writer,
    part_key,
)
from ckptmap.recoding import grid_of, kept_at
from ckptmap.rows import Rows
from ckptmap.steps import Compare, Encode, FilePlan, Target
from ckptmap.tensors import Extent, Path, StoredTensor, TensorInfo
from ckptmap.woven import Pieced


@dataclass
class Draft:
    """What planning gathers, tensor by tensor."""

    ckpt: Checkpoint
    setup: Setup
    writer: Writer
    cutter: Cutter
    fingerprints: Mapping[str, Fingerprint]
    steps: list[Step] = field(default_factory=list)
    out: list[OutTensor] = field(default_factory=list)
    sources: dict[Path, StoredTensor | None] = field(default_factory=dict)
    keys: dict[Path, str] = field(default_factory=dict)
    encodes: list[tuple[LazyTensor, Encoding, dict[str, Path], str, Grid | None]] = field(
        default_factory=list
    )
    compares: list[Compare] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unresolved: list[Unresolved] = field(default_factory=list)
    records: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    extra: dict[Path, Any] = field(default_factory=dict)
    shared: dict[object, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kinds: dict[int, tuple[int, tuple[int, ...], str]] = field(default_factory=dict)
    """Bytes, shape and dtype by the id of an info, which thousands of tensors share."""
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

    def plain(self, fqn: str, path: Path, stored: StoredTensor) -> bool:
        """A dense weight that is one run of bytes and moves as it is, as nearly all do: `tensor` in
        a third of the time. False: it is not one, and nothing was done."""
        place = stored.place
        if type(place) is not Extent or stored.replicas:
            return False
        info = stored.info
        known = self.kinds.get(id(info))
        if known is None:
            known = self.kinds[id(info)] = info.nbytes, info.shape, info.dtype
        nbytes, shape, dtype = known
        if place.offset + nbytes > self.fingerprints[place.file].nbytes:
            raise self._past_the_end(fqn, place.file, place.offset + nbytes)
        self._place(fqn, path, info, stored)
        self.steps.append(Step(fqn, "model", shape, dtype, dtype, "bytes", nbytes, nbytes))
        return True

    def _check_dense(self, lazy: LazyTensor, encoding: Encoding | None) -> None:
        name = (encoding or lazy.encoding_).name
        refuse_unheld(lazy.fqn, self.setup.name, name)
        if self.setup.dense and name != "dense":
            setup = self.setup.name
            raise PlanError(
                "CKM203",
                f"{lazy.fqn}: would be {name}, {setup} holds dense tensors only: what loads it knows"
                " no payloads with scales",
                f"decode it, for example --to {setup}-bf16, or choose fsdp2-{name}",
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
        if plain is not None and lazy.encoding_.name == "dense" and type(plain.place) is Extent:
            info, dtype, nbytes = plain.info, lazy.info.dtype, plain.info.nbytes
            self._place(lazy.fqn, path, info, plain)
            step = Step(lazy.fqn, role, info.shape, dtype, dtype, "bytes", nbytes, nbytes)
            self.steps.append(step)
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
        grid = grid_of(lazy)
        kept = kept_at(lazy, encoding, grid)
        fidelity = kept or _fidelity(lazy, encoding, parts)
        paths = {part: _part_path(encoding, path, part) for part in parts}
        self.encodes.append((lazy, encoding, paths, fidelity, grid if kept else None))
        self._record(encoding, lazy.info, path)
        out = parts[""] if encoding.name == "dense" else lazy.info
        self._step(
            lazy, role, _kind(encoding, out), fidelity, sum(p.nbytes for p in parts.values())
        )

    def _place(self, fqn: str, path: Path, info: TensorInfo, stored: StoredTensor | None) -> None:
        count = len(self.sources)
        self.sources[path] = stored
        if len(self.sources) == count:
            raise PlanError(
                "CKM114", f"{fqn}: {join(path)} would be written twice", "use --exclude"
            )
        if not fqn.isascii() and any("\ud800" <= char <= "\udfff" for char in fqn):
            raise PlanError(
                "CKM202",
                f"{fqn!r}: a name with half a character in it (a lone surrogate), no file holds that",
                "leave it out with --exclude, or rename it where it is saved",
            )
        alias = self._alias(fqn, path, stored) if self.writer.shares_storage else None
        self.keys[path] = fqn
        chunks, placement = self.cutter.cut(fqn, info)
        unit = self.cutter.unit(fqn, info)
        self.out.append(OutTensor(path, info, chunks, alias, placement, unit))

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
        step = Step(lazy.fqn, role, lazy.shape, source, target, fidelity, lazy.nbytes, nbytes)
        self.steps.append(step)

    def must_equal(self, kept: LazyTensor, other: LazyTensor, title: str) -> None:
        """The other is not written, so its bytes must be those of the kept tensor."""
        if not (kept.parts and other.parts):
            raise PlanError(
                "CKM208",
                f"{title}: is decoded on the way, so it cannot be compared as it is stored",
                "leave one of them out with --exclude",
            )
        for part, stored in other.parts.items():
            self._prove(other.fqn, stored)
            self.compares += [Compare(title, kept.parts[part], chunk) for chunk in stored.chunks]

    # ------------------------------------------------------------------ the whole

    def placed(self, max_shard_nbytes: int) -> tuple[list[FilePlan], list[Encode]]:
        """Every file with the source of each slot, and what is to be encoded into which slots."""
        state = OutState(
            self.out, _writable(self.extra, self.out), self.records, self.cutter.world_size,
            max_shard_nbytes,
        )  # fmt: skip
        targets: dict[Path, list[Target]] = {}
        files = []
        for number, out in enumerate(self.writer.files(state, "archive")):
            sources = [self.sources[slot.path] for slot in out.slots]
            files.append(FilePlan(out, sources))
            for index, (slot, stored) in enumerate(zip(out.slots, sources, strict=True)):
                if stored is None:
                    targets.setdefault(slot.path, []).append(Target(number, index))
        prove_output(self.out, files)
        encodes = [
            Encode(
                lazy,
                encoding,
                {part: _in_order(targets.get(path, ()), files) for part, path in paths.items()},
                fidelity,
                kept,
            )
            for lazy, encoding, paths, fidelity, kept in self.encodes
        ]
        return files, encodes


def _part_path(encoding: Encoding, path: Path, part: str) -> Path:
    return (*path[:-1], part_key(encoding, str(path[-1]), part)) if part else path


def _kind(encoding: Encoding, info: TensorInfo) -> str:
    return info.dtype if encoding.name == "dense" else f"{encoding.name}({info.dtype})"


def _fidelity(lazy: LazyTensor, encoding: Encoding, parts: Mapping[str, TensorInfo]) -> str:
    if encoding.name != "dense":
        return "requantize" if lazy.quantized else "quantize"
    return "exact" if parts[""].dtype == lazy.dtype and not lazy.lossy else "cast"


def _in_order(targets: Iterable[Target], files: Sequence[FilePlan]) -> tuple[Target, ...]:
    return tuple(sorted(targets, key=lambda t: files[t.file].out.slots[t.slot].box.offsets))


def _writable(extra: Mapping[Path, Any], tensors: Iterable[OutTensor]) -> dict[Path, Any]:
    """Plain values by path; a dict of integer keys is one value, for a DCP path cannot say that an
    integer is one. Where it holds tensors as well, its leaves stay as they are."""
    roots = set[Path]()
    for path in extra:
        roots.update(path[:at] for at in [at for at, s in enumerate(path) if counts(s)][:1])
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
