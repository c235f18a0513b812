"""plan(): from a checkpoint and `--to` to a Plan, from headers alone.

Per logical tensor: which encoding it gets, what parts that makes, how the layout cuts them; then
the writer places every chunk, and every placed byte is traced to a source region or an encoder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path as FilePath
from typing import Any

from ckptmap import registry, setups
from ckptmap.checkpoint import Checkpoint, join, nest, open
from ckptmap.coverage import prove_tiling
from ckptmap.cutting import Cutter, prove_output
from ckptmap.errors import PlanError, SourceError
from ckptmap.files import Fingerprint
from ckptmap.foreign import foreign_tensors
from ckptmap.lazy import LazyTensor
from ckptmap.mapping.wrappers import wrap_prefix
from ckptmap.optim.carrying import carried
from ckptmap.optim.reading import OptimizerReader
from ckptmap.optim.state import KeyForm
from ckptmap.plans import Options, Plan, Step, Unresolved
from ckptmap.protocols import (
    Encoding,
    OutState,
    OutTensor,
    Refusal,
    Writer,
)
from ckptmap.setups import Aim
from ckptmap.steps import Compare, Encode, FilePlan, Target
from ckptmap.tensors import FLOATING, Path, StoredTensor, TensorInfo
from ckptmap.wire.gc_pause import paused_gc


@dataclass
class _Draft:
    """What planning gathers, tensor by tensor."""

    steps: list[Step] = field(default_factory=list)
    out: list[OutTensor] = field(default_factory=list)
    sources: dict[Path, StoredTensor | None] = field(default_factory=dict)
    keys: dict[Path, str] = field(default_factory=dict)
    encodes: list[tuple[LazyTensor, Encoding, dict[str, Path], str]] = field(default_factory=list)
    compares: list[Compare] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unresolved: list[Unresolved] = field(default_factory=list)
    records: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    extra: dict[Path, Any] = field(default_factory=dict)
    shared: dict[object, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan(
    source: str | os.PathLike[str] | Checkpoint,
    to: str,
    *,
    options: Options | None = None,
    **asked: Any,
) -> Plan:
    """What `convert` would do; nothing is written, no tensor byte is read.

    Keyword arguments are the fields of `Options`. Raises SourceError or PlanError where there is
    nothing to plan; keys that cannot be accounted for are in `Plan.unresolved`.
    """
    options = options or Options(to=to, **asked)
    aim = setups.parse(to)
    ckpt = _source(source, options)
    with paused_gc():
        return _Planner(ckpt, aim, options).plan()


def _source(source: str | os.PathLike[str] | Checkpoint, options: Options) -> Checkpoint:
    if not isinstance(source, Checkpoint):
        source = open(source, root=options.source_root, like=options.like)
    source.order_optimizer(options.param_order, options.like or options.config_from)
    return source


class _Planner:
    """One planning run; each method handles one kind of leaf."""

    def __init__(self, ckpt: Checkpoint, aim: Aim, options: Options) -> None:
        self.ckpt = ckpt
        self.aim = aim
        self.options = options
        self.writer: Writer = registry.writer(aim.setup.writer)
        self.cutter = Cutter(ckpt, aim.setup, options)
        self.world_size = self.cutter.world_size
        self.draft = _Draft()
        self.fingerprints = {file: Fingerprint.of(file) for file in ckpt.index.files}
        self.names = self._names()
        self.siblings = self._siblings()

    def plan(self) -> Plan:
        self._refused()
        with_optimizer = self._carries_optimizer()
        extra = self._extra()
        rooted = with_optimizer or bool(extra) or bool(self._others())
        root = self._root(rooted)
        self._weights(root)
        if with_optimizer:
            self._optimizer_state()
        if self.aim.setup.holds_extra:
            for path, lazy in self._others().items():
                self._tensor(lazy, "other", ("extra", *path), None)
        self.draft.extra.update(extra)
        carried = self._carried()
        return self._finish(carried)

    # ------------------------------------------------------------------ what is asked

    def _names(self) -> dict[str, str]:
        """Plain FQN -> name in the output."""
        if self.options.names_like is not None:
            with open(self.options.names_like) as like:
                return {fqn: like.names.get(fqn, fqn) for fqn in self.ckpt}
        segments = self.aim.setup.wrap
        prefix = "".join(segment + "." for segment in segments)
        if self.options.wrap is not None:
            prefix = wrap_prefix(self.options.wrap)
        return {fqn: prefix + fqn for fqn in self.ckpt}

    def _siblings(self) -> list[str]:
        """Files beside the weights, if the setup has a place for them."""
        if self.aim.setup.carrier is None:
            return []
        path = FilePath(self.ckpt.index.beside or self.ckpt.path)
        directory = path if path.is_dir() else path.parent
        return [str(file) for file in directory.iterdir() if str(file) not in self.fingerprints]

    def _root(self, rooted: bool) -> Path:
        setup = self.aim.setup
        if self.options.root is not None and setup.rooted:
            raise PlanError(
                "CKM205", f"--root {self.options.root}: {setup.name} has its own", "leave it out"
            )
        if self.options.root is not None:
            return tuple(self.options.root.split("/")) if self.options.root else ()
        return ("model",) if rooted or setup.rooted else ()

    def _dropped_by(self, key: str) -> str | None:
        for pattern in self.options.drop:
            if key == pattern or fnmatchcase(key, pattern):
                return f"--drop {pattern}"
        return None

    # ------------------------------------------------------------------ leaves by kind

    def _refused(self) -> None:
        for item in self.ckpt.refused:
            why = self._dropped_by(item.key) if item.droppable else None
            if why is not None:
                self.draft.dropped[item.key] = why
                continue
            hint = f"leave it behind with --drop {item.key}" if item.droppable else (
                "save it with plain tensors; a class that ckptmap does not know is never called"
            )  # fmt: skip
            self.draft.unresolved.append(Unresolved(item.key, item.reason, hint))

    def _carries_optimizer(self) -> bool:
        reader, draft = self.ckpt.optimizer_reader, self.draft
        if not reader.present:
            return False
        found = reader.named()
        why = self._dropped_by("optimizer")
        if self.options.optimizer == "drop":
            why = "--optimizer drop"
        elif not self.aim.setup.holds_extra:
            why = f"{self.aim.setup.name} has no place for optimizer state"
        if why is not None:
            draft.dropped["optimizer"] = why
        elif reader.by_index or reader.form is None:
            draft.unresolved.append(_unnamed(reader))
        else:
            if reader.order:
                draft.notes.append(f"optimizer order: {reader.order}")
            elif self.options.param_order is not None:
                draft.notes.append(
                    "optimizer order: by name in the file, --param-order is not used"
                )
            return bool(found.leaves or found.groups or found.rest)
        return False

    def _extra(self) -> dict[Path, Any]:
        kept: dict[Path, Any] = {}
        for path, value in self.ckpt.plain.items():
            key = join(path)
            why = self._dropped_by(key) or self._dropped_by(str(path[0]))
            if why is None and not self.aim.setup.has_place_for(path):
                why = f"{self.aim.setup.name} has no place for what is not a weight"
            if why is not None:
                self.draft.dropped[key] = why
            else:
                kept[("extra", *path)] = value
        return kept

    def _others(self) -> dict[Path, LazyTensor]:
        kept = {}
        for path, lazy in self.ckpt.other.items():
            why = self._dropped_by(join(path))
            if why is None and not self.aim.setup.has_place_for(path, tensor=True):
                why = f"{self.aim.setup.name} has no place for what is not a weight"
            if why is not None:
                self.draft.dropped[join(path)] = why
            else:
                kept[path] = lazy
        return kept

    def _weights(self, root: Path) -> None:
        ties = self._declared_ties()
        foreign = foreign_tensors(self.ckpt.keys()) if self.aim.scheme is not None else {}
        for fqn in self.ckpt:
            why = self._excluded(fqn)
            if why is not None:
                self.draft.dropped[fqn] = why
            elif fqn in ties:
                self._tie(fqn, ties[fqn])
            else:
                lazy = self.ckpt[fqn]
                encoding = None if self._keeps_foreign(fqn, foreign) else self._encoding(lazy)
                self._tensor(lazy, "model", (*root, self.names[fqn]), encoding)
        if not any(step.role == "model" for step in self.draft.steps):
            raise PlanError(
                "CKM206",
                f"{self.ckpt.path}: no tensor is left to convert of {len(self.ckpt)}",
                "check --include and --exclude",
            )

    def _keeps_foreign(self, fqn: str, foreign: Mapping[str, str]) -> bool:
        """A part of a quantized tensor that cannot be decoded here moves as bytes, if so asked."""
        if fqn not in foreign:
            return False
        if not any(fnmatchcase(fqn, pattern) for pattern in self.options.no_encode):
            self.draft.unresolved.append(
                Unresolved(
                    fqn,
                    f"is part of a {foreign[fqn]} tensor, which cannot be decoded for {self.aim.text}",
                    f"move it as bytes: --to {self.aim.setup.name}, or --no-encode '{fqn}'",
                )
            )
        return True

    def _excluded(self, fqn: str) -> str | None:
        include, exclude = self.options.include, self.options.exclude
        if not (include or exclude or self.options.drop):
            return None
        if include and not any(fnmatchcase(fqn, pattern) for pattern in include):
            return "not in --include"
        found = next((pattern for pattern in exclude if fnmatchcase(fqn, pattern)), None)
        return f"--exclude {found}" if found else self._dropped_by(fqn)

    def _optimizer_state(self) -> None:
        """State of the weights that are carried, in the key form that was asked for."""
        form = self._key_form()
        found = carried(
            self.ckpt.optimizer_reader.named(), self.ckpt, self.draft.dropped, self._dropped_by
        )
        self.draft.dropped.update(found.dropped)
        for fqn in found.strangers:
            self.draft.unresolved.append(
                Unresolved(
                    f"optimizer.{fqn}",
                    "its optimizer state belongs to no weight of the checkpoint",
                    f"leave it behind with --drop 'optimizer.{fqn}', or all with --optimizer drop",
                )
            )
        entries = [*form.write(found.optimizer), *found.optimizer.rest.items()]
        for path, value in entries:
            if isinstance(value, LazyTensor):
                self._tensor(value, "optimizer", ("optimizer", *path), None)
            else:
                self.draft.extra["optimizer", *path] = value
        for kept, other in found.optimizer.same:
            self._must_equal(kept, other, f"{kept.fqn} of {other.fqn}")

    def _key_form(self) -> KeyForm:
        name = self.aim.setup.optimizer_keys or self.options.optimizer_keys
        form = registry.key_form(name)
        if form is None:
            known = ", ".join(found.name for found in registry.key_forms())
            raise PlanError(
                "CKM201", f"--optimizer-keys {name!r} is no key form", f"choose one of {known}"
            )
        if form.whole and self.aim.setup.sharded:
            raise PlanError(
                "CKM207",
                f"--optimizer-keys {name}: {self.aim.setup.name} turns integer keys into strings,"
                " and an optimizer would load no state from it without saying so",
                "use --optimizer-keys fqn, which set_optimizer_state_dict takes",
            )
        return form

    # ------------------------------------------------------------------ one tensor

    def _encoding(self, lazy: LazyTensor) -> Encoding | None:
        """The encoding it is to get; None: as it is."""
        scheme = self.aim.scheme
        if scheme is None or lazy.encoding == scheme.name:
            return None
        if any(fnmatchcase(lazy.fqn, pattern) for pattern in self.options.no_encode):
            return None
        if any(fnmatchcase(lazy.fqn, pattern) for pattern in self.options.encode):
            forced = scheme.encoding(lazy.info)
            if isinstance(forced, Refusal):
                raise PlanError(
                    "CKM203", f"{lazy.fqn}: cannot be {scheme.name}: {forced.reason}",
                    "narrow --encode, or leave it out with --no-encode",
                )  # fmt: skip
            return forced
        return None if self.options.encode else scheme.target(lazy.fqn, lazy.info)

    def _tensor(self, lazy: LazyTensor, role: str, path: Path, encoding: Encoding | None) -> None:
        self._check_dense(lazy, encoding)
        for stored in lazy.parts.values():
            self._prove(lazy.fqn, stored)
        if encoding is None or (encoding == lazy.encoding_):
            self._copy(lazy, role, path)
        else:
            self._encode(lazy, role, path, encoding)

    def _check_dense(self, lazy: LazyTensor, encoding: Encoding | None) -> None:
        name = (encoding or lazy.encoding_).name
        if self.aim.setup.dense and name != "dense":
            setup = self.aim.setup.name
            raise PlanError(
                "CKM203",
                f"{lazy.fqn}: would be {name}, {setup} holds dense tensors only: what loads it knows"
                " no payloads with scales",
                f"decode it, for example --to {setup}-bf16, or choose fsdp2-{name}",
            )

    def _prove(self, fqn: str, stored: StoredTensor) -> None:
        """Chunks tile the tensor, every region lies inside its file; replicas will be compared."""
        wrong = prove_tiling(stored.info.shape, [chunk.box for chunk in stored.chunks])
        if wrong is not None:
            raise SourceError(
                "CKM112", f"{self.ckpt.path}: {fqn}: {wrong}, expected to fill {stored.info}",
                "a rank's file may be missing or from another run; save it again",
            )  # fmt: skip
        for chunk in (*stored.chunks, *stored.replicas) if stored.replicas else stored.chunks:
            region = chunk.region
            limit = self.fingerprints[region.file].nbytes
            if region.offset + region.span_nbytes > limit:
                raise SourceError(
                    "CKM104",
                    f"{region.file}: {fqn} ends at byte {region.offset + region.span_nbytes},"
                    f" the file at {limit}",
                    "it is truncated; copy it again",
                )
        self.draft.compares += [Compare(fqn, stored, replica) for replica in stored.replicas]

    def _copy(self, lazy: LazyTensor, role: str, path: Path) -> None:
        rearranged = False
        for part, stored in lazy.parts.items():
            self._place(lazy.fqn, _part_path(path, part), stored.info, stored)
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
            self._place(lazy.fqn, _part_path(path, part), info, None)
        fidelity = _fidelity(lazy, encoding, parts)
        paths = {part: _part_path(path, part) for part in parts}
        self.draft.encodes.append((lazy, encoding, paths, fidelity))
        self._record(encoding, lazy.info, path)
        out = parts.get("", lazy.info)
        self._step(
            lazy, role, _kind(encoding, out), fidelity, sum(p.nbytes for p in parts.values())
        )

    def _place(self, fqn: str, path: Path, info: TensorInfo, stored: StoredTensor | None) -> None:
        if path in self.draft.sources:
            raise PlanError(
                "CKM114", f"{fqn}: {join(path)} would be written twice", "use --exclude"
            )
        alias = self._alias(fqn, path, stored)
        self.draft.sources[path] = stored
        self.draft.keys[path] = fqn
        chunks, placement = self.cutter.cut(fqn, info)
        self.draft.out.append(OutTensor(path, info, chunks, alias, placement))

    def _alias(self, fqn: str, path: Path, stored: StoredTensor | None) -> Path | None:
        """The earlier path whose storage this tensor shares, where the source says so."""
        if stored is None or stored.share is None or not stored.info.numel:
            return None
        if not self.writer.shares_storage:
            return None
        first = self.draft.shared.setdefault(stored.share, path)
        if first == path:
            return None
        self.draft.tied[fqn] = self.draft.keys[first]
        return first

    def _record(self, encoding: Encoding, info: TensorInfo, path: Path) -> None:
        record = encoding.record(info)
        if record is not None:
            self.draft.records[join(path)] = record

    def _step(self, lazy: LazyTensor, role: str, target: str, fidelity: str, nbytes: int) -> None:
        source = _kind(lazy.encoding_, lazy.info)
        step = Step(lazy.fqn, role, lazy.shape, source, target, fidelity, lazy.nbytes, nbytes)
        self.draft.steps.append(step)

    # ------------------------------------------------------------------ ties

    def _declared_ties(self) -> Mapping[str, str]:
        """Tied name -> the name kept, where what lies beside the weights says so."""
        carrier = self.aim.setup.carrier
        if carrier is None:
            return {}
        infos = {fqn: self.ckpt.group(fqn).info for fqn in self.ckpt if self._excluded(fqn) is None}
        ties = carrier.ties(infos, self.siblings, self.options.config_from)
        return {
            fqn: kept
            for fqn, kept in ties.items()
            if self.ckpt.group(fqn).encoding == self.ckpt.group(kept).encoding
        }

    def _tie(self, fqn: str, kept: str) -> None:
        """Left out because the config ties it; its bytes must equal the kept tensor's."""
        lazy, other = self.ckpt[fqn], self.ckpt[kept]
        self.draft.tied[fqn] = kept
        self._must_equal(other, lazy, f"{fqn} (tied to {kept})")

    def _must_equal(self, kept: LazyTensor, other: LazyTensor, title: str) -> None:
        """The other is not written, so its bytes must be those of the kept tensor."""
        for part, stored in other.parts.items():
            self._prove(other.fqn, stored)
            self.draft.compares += [
                Compare(title, kept.parts[part], chunk) for chunk in stored.chunks
            ]

    def _carried(self) -> dict[str, bytes]:
        carrier = self.aim.setup.carrier
        if carrier is None:
            return {}
        infos = [out.info for out in self.draft.out]
        dtypes = {info.dtype for info in infos if info.dtype in FLOATING and len(info.shape) > 1}
        carried, notes = carrier.files(self.siblings, self.options.config_from, sorted(dtypes))
        self.draft.notes += notes
        return carried

    # ------------------------------------------------------------------ the whole

    def _finish(self, carried: Mapping[str, bytes]) -> Plan:
        draft = self.draft
        state = OutState(
            draft.out, _writable(draft.extra), draft.records, self.world_size,
            self.options.max_shard_nbytes,
        )  # fmt: skip
        outs = self.writer.files(state, "archive")
        targets: dict[Path, list[Target]] = {}
        files = []
        for number, out in enumerate(outs):
            sources = [draft.sources[slot.path] for slot in out.slots]
            files.append(FilePlan(out, sources))
            for index, (slot, stored) in enumerate(zip(out.slots, sources, strict=True)):
                if stored is None:
                    targets.setdefault(slot.path, []).append(Target(number, index))
        prove_output(draft.out, files)
        encodes = [
            Encode(lazy, encoding, {part: _in_order(targets.get(p, ()), files) for part, p in paths.items()}, fidelity)
            for lazy, encoding, paths, fidelity in draft.encodes
        ]  # fmt: skip
        return Plan(
            self.ckpt, self.aim, self.options, self.world_size, draft.steps, files, encodes,
            draft.compares, carried, draft.dropped, draft.tied, draft.unresolved, draft.keys,
            draft.records, self.fingerprints, (*self.ckpt.notes, *draft.notes),
        )  # fmt: skip


def _unnamed(reader: OptimizerReader) -> Unresolved:
    if reader.form is None:
        return Unresolved(
            "optimizer",
            "its state is keyed in no form that is known",
            "convert the weights alone with --optimizer drop",
        )
    return Unresolved(
        "optimizer",
        f"its state is keyed by parameter index, and the file does not say which is which:"
        f" {reader.why}",
        "give the names in order with --param-order FILE, or convert the weights alone with"
        " --optimizer drop",
    )


def _part_path(path: Path, part: str) -> Path:
    return (*path[:-1], f"{path[-1]}.{part}") if part else path


def _kind(encoding: Encoding, info: TensorInfo) -> str:
    return info.dtype if encoding.name == "dense" else f"{encoding.name}({info.dtype})"


def _fidelity(lazy: LazyTensor, encoding: Encoding, parts: Mapping[str, TensorInfo]) -> str:
    if encoding.name != "dense":
        return "quantize" if lazy.encoding == "dense" else "requantize"
    return "exact" if parts[""].dtype == lazy.dtype else "cast"


def _in_order(targets: Iterable[Target], files: Sequence[FilePlan]) -> tuple[Target, ...]:
    return tuple(sorted(targets, key=lambda t: files[t.file].out.slots[t.slot].box.offsets))


def _writable(extra: Mapping[Path, Any]) -> dict[Path, Any]:
    """Plain values by path, lists whole again: a list of dicts is read leaf by leaf from DCP."""
    whole: dict[Path, Any] = {}
    lists: dict[Path, dict[Path, Any]] = {}
    for path, value in extra.items():
        at = next((i for i, segment in enumerate(path) if type(segment) is int), None)
        if at is None:
            whole[path] = value
        else:
            lists.setdefault(path[:at], {})[path[at:]] = value
    for path, values in lists.items():
        whole[path] = nest({("list", *rest): value for rest, value in values.items()})["list"]
    return whole


def replan(path: str | os.PathLike[str]) -> Plan:
    """The plan that `Plan.save` wrote, made again from its source: the same, or PlanError CKM209."""
    try:
        saved = json.loads(FilePath(path).read_text(encoding="utf-8"))
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in saved["options"].items()
        }
        options, source, digest = Options(**given), saved["source"]["path"], saved["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            "CKM209",
            f"{path}: is no saved plan: {error}",
            "write one with ckptmap plan -o plan.json",
        ) from error
    if options.param_order is not None:  # JSON has lists
        options = replace(options, param_order=tuple(map(tuple, options.param_order)))
    made = plan(source, options.to, options=options)
    if made.digest != digest:
        raise PlanError(
            "CKM209",
            f"{path}: {source} is not what was planned on: digest {made.digest[:12]}, expected {digest[:12]}",
            "plan again: the source, or ckptmap, has changed",
        )
    return made
