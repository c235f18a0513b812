"""plan(): from a checkpoint and `--to` to a Plan, from headers alone.

Per logical tensor: which encoding it gets, what parts that makes, how the layout cuts them; then
the writer places every chunk, and every placed byte is traced to a source region or an encoder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path as FilePath
from typing import Any

from ckptmap import registry, setups
from ckptmap.arranging import arranged
from ckptmap.checkpoint import Checkpoint, open
from ckptmap.choosing import encoding_for, left_by_shape, refused_if_strict, unmatched
from ckptmap.collapse import listed
from ckptmap.cutting import Cutter
from ckptmap.declaring import Quantized, passed_on
from ckptmap.drafting import Draft
from ckptmap.errors import PlanError
from ckptmap.files import Fingerprint, as_named
from ckptmap.foreign import NAKED, NAKED_INT8, RESTORE, foreign_tensors
from ckptmap.groups import DENSE
from ckptmap.lazy import LazyTensor
from ckptmap.leaves import join
from ckptmap.mapping.wrappers import wrap_prefix
from ckptmap.model_order import model_order, with_units
from ckptmap.optim.carrying import carried
from ckptmap.optim.reading import OptimizerReader
from ckptmap.optim.state import KeyForm
from ckptmap.plans import Options, Plan, Unresolved
from ckptmap.protocols import Encoding
from ckptmap.remote.locating import named_as_asked
from ckptmap.setups import Aim
from ckptmap.siblings import Sibling
from ckptmap.sourcing import Sourced, sourced
from ckptmap.tensors import FLOATING, Path, StoredTensor, TensorInfo
from ckptmap.translation import Translated
from ckptmap.wire.gc_pause import paused_gc


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
    located = options.located()
    with named_as_asked():
        here = with_units(located, aim.setup)
        given = sourced(source, here)
        with paused_gc():
            made = _Planner(given, aim, here).plan()
    if located is options:
        return made
    return replace(made, options=here.written_as(options))


class _Planner:
    """One planning run; each method handles one kind of leaf."""

    def __init__(self, given: Sourced, aim: Aim, options: Options) -> None:
        self.ckpt = ckpt = given.ckpt
        self.aim = aim
        self.options = options
        writer = registry.writer(aim.setup.writer)
        cutter = Cutter(ckpt, aim.setup, options)
        self.world_size = cutter.world_size
        self.fingerprints = {file: Fingerprint.of(file) for file in ckpt.index.files}
        self.draft = Draft(ckpt, aim.setup, writer, cutter, self.fingerprints)
        self.draft.compares += given.compares
        self.draft.notes += given.notes
        self.names = self._names()
        self.foreign: Mapping[str, str] = {}
        self.written: dict[str, tuple[Encoding, TensorInfo]] = {}
        self.siblings = self._siblings()

    def plan(self) -> Plan:
        self._refused()
        self._untranslated()
        with_optimizer = self._carries_optimizer()
        extra = self._extra()
        rooted = with_optimizer or bool(extra) or bool(self._others())
        root = self._root(rooted)
        self._weights(root)
        if with_optimizer:
            self._optimizer_state()
        if self.aim.setup.holds_extra:
            for path, lazy in self._others().items():
                self.draft.tensor(lazy, "other", ("extra", *path), None)
        self.draft.extra.update(extra)
        self.draft.records.update(passed_on(self.ckpt.index.records, self.ckpt, self.written))
        carried, draft = self._carried(), self.draft
        draft.notes += unmatched(self.options, self.ckpt, draft.dropped)
        left = left_by_shape(self.ckpt, draft.steps, self.aim.scheme, self.options)
        draft.notes += listed("stays as it is", left)
        draft.unresolved += refused_if_strict(left, self.options)
        files, encodes = draft.placed(self.options.max_shard_nbytes)
        return Plan(
            self.ckpt, self.aim, self.options, self.world_size, draft.steps, files, encodes,
            draft.compares, carried, draft.dropped, draft.tied, draft.unresolved, draft.keys,
            draft.records, self.fingerprints,
            tuple(as_named(note) for note in (*self.ckpt.notes, *draft.notes)),
        )  # fmt: skip

    # ------------------------------------------------------------------ what is asked

    def _names(self) -> dict[str, str]:
        """Plain FQN -> name in the output."""
        if self.options.names_like is not None:
            with open(self.options.names_like) as like:
                return {fqn: like.names.get(fqn, fqn) for fqn in self.ckpt}
        prefix = "".join(segment + "." for segment in self.aim.setup.wrap)
        if self.options.wrap is not None:
            prefix = wrap_prefix(self.options.wrap)
        return {fqn: prefix + fqn if prefix else fqn for fqn in self.ckpt}

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

    def _dropped_by(self, key: str, below: bool = False) -> str | None:
        """`below`: a pattern also takes what lies below the entry that it names."""
        for pattern in self.options.drop:
            inside = below and fnmatchcase(key, f"{pattern}.*")
            if inside or key == pattern or fnmatchcase(key, pattern):
                return f"--drop {pattern}"
        return None

    # ------------------------------------------------------------------ leaves by kind

    def _refused(self) -> None:
        for item in self.ckpt.refused:
            why = self._dropped_by(item.key, below=True) if item.droppable else None
            if why is not None:
                self.draft.dropped[item.key] = why
                continue
            hint = f"leave it behind with --drop {item.key}" if item.droppable else (
                "save it with plain tensors; a class that ckptmap does not know is never called"
            )  # fmt: skip
            self.draft.unresolved.append(Unresolved(item.key, item.reason, hint))

    def _untranslated(self) -> None:
        """Keys that have no name in the scheme that was asked for: dropped by it, or unknown."""
        if not isinstance(self.ckpt, Translated):
            return
        self.draft.dropped.update(self.ckpt.dropped)
        for key in self.ckpt.unmapped:
            why = self._excluded(key)
            if why is not None:
                self.draft.dropped[key] = why
            else:
                self.draft.unresolved.append(Unresolved(key, *self.ckpt.unknown(key)))

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
            why = self._dropped_by(key, below=True)
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
            why = self._dropped_by(join(path), below=True)
            if why is None and not self.aim.setup.has_place_for(path, tensor=True):
                why = f"{self.aim.setup.name} has no place for what is not a weight"
            if why is not None:
                self.draft.dropped[join(path)] = why
            else:
                kept[path] = lazy
        return kept

    def _weights(self, root: Path) -> None:
        ties = {**self._declared_ties(), **self.ckpt.ties}
        self.foreign = foreign_tensors(self.ckpt.infos()) if self.aim.scheme else {}
        dense = {} if self.aim.scheme else self.ckpt.dense()
        for fqn in self._ordered():
            why = self._excluded(fqn)
            if why is not None:
                self.draft.dropped[fqn] = why
            elif fqn in ties:
                self._tie(fqn, ties[fqn])
            else:
                self._weight(fqn, (*root, self.names[fqn]), dense.get(fqn))
        if not any(step.role == "model" for step in self.draft.steps):
            raise PlanError(
                "CKM206",
                f"{self.ckpt.path}: no tensor is left to convert of {len(self.ckpt)}",
                "check --include and --exclude"
                + ("; --include goes by the names in DST" if self.options.names else ""),
            )

    def _weight(self, fqn: str, path: Path, plain: StoredTensor | None) -> None:
        if plain is not None and self.draft.plain(fqn, path, plain):
            self.written[str(path[-1])] = DENSE, plain.info
            return
        lazy, encoding, declared = self.ckpt[fqn], None, self.aim.setup.carrier is not None
        if not self._keeps_foreign(fqn, self.foreign):
            encoding = encoding_for(lazy, self.aim.scheme, self.options, declared=declared)
        self.written[str(path[-1])] = encoding or lazy.encoding_, lazy.info
        self.draft.tensor(lazy, "model", path, encoding)

    def _ordered(self) -> Sequence[str]:
        """As stored, or in the model's order where that decides what the output is."""
        if not self.draft.cutter.by_order:
            return list(self.ckpt)
        cutter = self.draft.cutter
        left = {
            fqn
            for fqn in self.ckpt
            if cutter.unit(fqn, self.ckpt[fqn].info) and self._excluded(fqn) is not None
        }
        order, source = model_order(self.ckpt, self.options.like or self.options.config_from, left)
        given = self.options.fsdp_units
        units = "".join(f"{pattern}, " for pattern in given[:4])
        units += f"... ({len(given)}), " if len(given) > 4 else ""
        self.draft.notes.append(
            f"FSDP units: {units}the root; use_orig_params={self.options.use_orig_params}; order of"
            f" parameters: {source}"
        )
        return order

    def _keeps_foreign(self, fqn: str, foreign: Mapping[str, str]) -> bool:
        """A part of a quantized tensor that cannot be decoded here moves as bytes, if so asked."""
        if fqn not in foreign:
            return False
        if not any(fnmatchcase(fqn, pattern) for pattern in self.options.no_encode):
            self.draft.unresolved.append(
                Unresolved(
                    fqn,
                    f"is part of a {foreign[fqn]} tensor, which cannot be decoded for {self.aim.text}",
                    (RESTORE if foreign[fqn] in (NAKED, NAKED_INT8) else "")
                    + f"move it as bytes: --to {self.aim.setup.name}, or --no-encode '{fqn}'",
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
        draft, options = self.draft, self.options
        optimizer, notes = arranged(
            found.optimizer, self.ckpt, self.aim.setup, draft.cutter, options
        )
        draft.notes += notes
        entries = [*form.write(optimizer), *optimizer.rest.items()]
        for path, value in entries:
            if isinstance(value, LazyTensor):
                encoding = encoding_for(value, None, self.options)
                self.draft.tensor(value, "optimizer", ("optimizer", *path), encoding)
            else:
                self.draft.extra["optimizer", *path] = value
        for kept, other in optimizer.same:
            self.draft.must_equal(kept, other, f"{kept.fqn} of {other.fqn}")

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
                f"--optimizer-keys {name}: {self.aim.setup.name} is of several ranks, and"
                " state that is keyed by index holds in one file of whole tensors only",
                "use --optimizer-keys fqn, which set_optimizer_state_dict takes",
            )
        return form

    # ------------------------------------------------------------------ ties

    def _declared_ties(self) -> Mapping[str, str]:
        """Tied name -> the name kept, where what lies beside the weights says so."""
        carrier = self.aim.setup.carrier
        if carrier is None or (isinstance(self.ckpt, Translated) and not self.ckpt.in_hub_names):
            return {}  # a config.json speaks of the hub's names; another scheme has ties of its own
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
        self.draft.must_equal(other, lazy, f"{fqn} (tied to {kept})")

    def _carried(self) -> dict[str, Sibling]:
        carrier = self.aim.setup.carrier
        if carrier is None:
            return {}
        infos = [out.info for out in self.draft.out]
        dtypes = {info.dtype for info in infos if info.dtype in FLOATING and len(info.shape) > 1}
        quantized = self._quantized()
        carried, notes = carrier.files(
            self.siblings, self.options.config_from, sorted(dtypes), quantized.config
        )
        self.draft.notes += [*notes, *quantized.unread()]
        return carried

    def _quantized(self) -> Quantized:
        schemes = {scheme.name: scheme for scheme in registry.schemes()}
        fresh = any(encoding.name != "dense" for _, encoding, *_ in self.draft.encodes)
        keep = self.aim.scheme is None or bool(self.foreign)
        return Quantized(self.written, fresh, keep, schemes)


def _unnamed(reader: OptimizerReader) -> Unresolved:
    if reader.form is None:
        return Unresolved(
            "optimizer",
            reader.why or "its state is keyed in no form that is known",
            "convert the weights alone with --optimizer drop",
        )
    return Unresolved(
        "optimizer",
        f"its state is keyed by parameter index, and the file does not say which is which:"
        f" {reader.why}",
        "give the names in order with --param-order FILE, or convert the weights alone with"
        " --optimizer drop",
    )
