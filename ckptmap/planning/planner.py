"""plan(): from a checkpoint and `--to` to a Plan, from headers alone.

Per logical tensor: which encoding it gets, what parts that makes, how the layout cuts them; then
the writer places every chunk, and every placed byte is traced to a source region or an encoder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path as FilePath
from typing import TypeVar, Unpack

from ckptmap import registry, setups
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.extra_state import NONE, States, noted, states_of
from ckptmap.checkpoint.groups import DENSE
from ckptmap.core.columns import distinct, each
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.name_table import listed
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_columns import Extents
from ckptmap.errors import PlanError
from ckptmap.planning import optimizer_state as optimizer_part
from ckptmap.planning.copied_files import kept_whole
from ckptmap.planning.encoding_choice import (
    beside_ties,
    encoding_for,
    left_by_shape,
    none_taken,
    refused_if_strict,
    unmatched,
    written_apart,
)
from ckptmap.planning.flat_param_order import model_order, with_units
from ckptmap.planning.name_conflicts import prove_apart, require_told_apart
from ckptmap.planning.options import OptionKeywords, Options, options_from
from ckptmap.planning.output_sharding import OutputSharding
from ckptmap.planning.plan import Plan, Unresolved
from ckptmap.planning.quantization_config import WrittenWeights, passed_on
from ckptmap.planning.request import Request, unknown_to_transformers
from ckptmap.planning.source import PlanSource, open_source
from ckptmap.planning.tensor_layout import LayoutBuilder
from ckptmap.protocols import CarriedFile, Encoding
from ckptmap.quantization.unsupported_schemes import NAKED, NAKED_INT8, RESTORE, foreign_tensors
from ckptmap.setups import Aim
from ckptmap.storage.files import Fingerprint, as_named
from ckptmap.storage.hub.resolve import named_as_asked
from ckptmap.tensors import FLOATING, Extent, Path, TensorInfo

T = TypeVar("T")


def plan(
    source: str | os.PathLike[str] | Checkpoint,
    to: str,
    *,
    options: Options | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Plan:
    """Return what `convert` would do, from headers: no tensor byte is read, nothing is written.

    Keyword arguments are the fields of `Options`; `options` gives all of them at once. Raises
    SourceError or PlanError where there is nothing to plan, ArgumentError CKM516 for a keyword that
    is unknown; `Plan.unresolved` has the keys that cannot be accounted for.
    """
    options = options or options_from(to, keywords, "plan()")
    aim = setups.parse(to)
    located = options.located()
    with named_as_asked():
        here = with_units(located, aim.setup)
        given = open_source(source, here)
        with paused_gc():
            made = _Planner(given, aim, here).plan()
    if located is options:
        return made
    return replace(made, options=here.with_paths_of(options))


APART = (
    "the model's config ties the two, but here they are different weights: write them with a config"
    " that does not (--config-from), or leave the wrong one out with --exclude"
)


class _Planner:
    """One planning run; each method handles one kind of leaf."""

    def __init__(self, given: PlanSource, aim: Aim, options: Options) -> None:
        self.ckpt = ckpt = given.ckpt
        self.aim = aim
        self.options = options
        writer = registry.writer(aim.setup.writer)
        cutter = OutputSharding(ckpt, aim.setup, options)
        self.world_size = cutter.world_size
        seen = ckpt.fingerprints
        self.fingerprints = {f: seen.get(f) or Fingerprint.of(f) for f in ckpt.index.files}
        self.draft = LayoutBuilder(ckpt, aim.setup, writer, cutter, self.fingerprints)
        self.draft.compares += given.compares
        self.draft.notes += given.notes
        self.asked = Request(ckpt, aim.setup, options)
        self.names = self.asked.names()
        self.states = self._states()
        self.foreign: Mapping[str, str] = {}
        self.beside_ties: Mapping[str, str] = {}
        self.written: dict[str, tuple[Encoding, TensorInfo]] = {}
        self.siblings = self._siblings()
        self.kept = kept_whole(ckpt, aim.setup, self.world_size, self.asked.dropped_whole)

    def plan(self) -> Plan:
        self._refused()
        self._untranslated()
        with_optimizer = optimizer_part.is_carried(self.draft, self.asked)
        extra, others = self._beside(self.ckpt.plain, False), self._beside(self.ckpt.other, True)
        root = self.asked.root(
            with_optimizer or any(p not in self.states for p in (*extra, *others))
        )
        self._weights(root)
        if with_optimizer:
            optimizer_part.put(self.draft, self.asked)
        if self.aim.setup.holds_extra:
            for path, lazy in others.items():
                self.draft.tensor(lazy, "other", self.states.place(path, root), None)
        self.draft.notes += noted(extra)
        self.draft.extra.update({self.states.place(path, root): v for path, v in extra.items()})
        self.draft.records.update(passed_on(self.ckpt.index.records, self.ckpt, self.written))
        carried, draft = self._carried(), self.draft
        loose = unmatched(self.options, self.ckpt, draft.dropped)
        draft.notes += [f"{pattern}: {why}" for pattern, why in loose.items()]
        apart = written_apart(self.ckpt, {**draft.dropped, **draft.tied})
        draft.notes += listed("tied, written under each name", apart)
        left = left_by_shape(self.ckpt, draft.steps, self.aim.scheme, self.options)
        draft.notes += listed("stays as it is", {**left, **self.beside_ties})
        empty = {} if left else none_taken(draft.steps, self.aim.scheme, self.options)
        draft.notes += [f"{why}: name weights with --encode GLOB" for why in empty.values()]
        draft.unresolved += refused_if_strict(left, loose, empty, self.options)
        prove_apart(draft.out.paths)
        carrier = self.aim.setup.carrier
        stem = None if carrier is None else carrier.stem(carried)
        files, encodes = draft.placed(self.options.max_shard_nbytes, stem)
        return Plan(
            self.ckpt, self.aim, self.options, self.world_size, draft.steps, files, encodes,
            draft.compares, carried, draft.dropped, draft.tied, draft.unresolved, draft.keys,
            draft.records, self.fingerprints,
            tuple(as_named(note) for note in (*self.kept.said(self.ckpt, carried), *draft.notes)),
        )  # fmt: skip

    def _siblings(self) -> list[str]:
        """Files beside the weights, if the setup has a place for them."""
        if self.aim.setup.carrier is None:
            return []
        path = FilePath(self.ckpt.index.sidecar_dir or self.ckpt.path)
        directory = path if path.is_dir() else path.parent
        return [str(file) for file in directory.iterdir() if str(file) not in self.fingerprints]

    # ------------------------------------------------------------------ leaves by kind

    def _refused(self) -> None:
        for item in self.ckpt.refused:
            why = self.asked.dropped_whole(item.key) if item.droppable else None
            if why is not None:
                self.draft.dropped[item.key] = why
                continue
            option = f"--drop {shlex.quote(item.key)}" if item.droppable else ""
            hint = f"leave it behind with {option}" if option else (
                "save it with plain tensors, as weight.dequantize() gives of a quantized one; what "
                "ckptmap does not know is never called"
            )  # fmt: skip
            self.draft.unresolved.append(Unresolved(item.key, item.reason, hint, option))

    def _untranslated(self) -> None:
        """Keys that have no name in the scheme that was asked for: dropped by it, or unknown."""
        translation = self.ckpt.translation
        if translation is None:
            return
        self.draft.dropped.update(translation.dropped)
        for key in translation.unmapped:
            why = self.asked.excluded(key)
            if why is not None:
                self.draft.dropped[key] = why
            else:
                self.draft.unresolved.append(Unresolved(key, *translation.unknown(key)))

    def _beside(self, held: Mapping[Path, T], tensors: bool) -> dict[Path, T]:
        """What the target has a place for, of what is neither weight nor optimizer state."""
        kept = {}
        for path, value in held.items():
            if self.kept.holds(path):
                continue
            why = self.asked.dropped_whole(join(path))
            if why is None and not self.aim.setup.has_place_for(path, tensor=tensors):
                why = f"{self.aim.setup.name} has no place for what is not a weight"
            if why is not None:
                self.draft.dropped[join(path)] = why
            else:
                kept[path] = value
        return kept

    def _states(self) -> States:
        setup, ckpt = self.aim.setup, self.ckpt
        if ckpt.translation is not None or setup.places or setup.filing:
            return NONE
        paths = {**ckpt.plain, **ckpt.other}
        return states_of(paths, ckpt.roles.model_root, self.names, self.asked.prefix)

    def _weights(self, root: Path) -> None:
        ties = {**self._declared_ties(), **self.ckpt.ties}
        self.foreign = foreign_tensors(self.ckpt.infos()) if self.aim.scheme else {}
        self.beside_ties = beside_ties(self.ckpt, self.aim.scheme, self.options)
        if not self._all_plain(root, ties):
            self._one_by_one(root, ties)
        if not self.draft.steps.fqns_of("model"):
            raise PlanError(
                "CKM206",
                f"{self.ckpt.path}: no tensor is left to convert of {len(self.ckpt)}",
                "check --include and --exclude"
                + ("; --include goes by the names in DST" if self.options.names else ""),
            )
        require_told_apart(self.draft.steps)

    def _all_plain(self, root: Path, ties: Mapping[str, str]) -> bool:
        """The weights side by side, where all of them go along as they are. False: they do not."""
        asked, run = self.options, self.ckpt.run()
        if run is None or ties or self.aim.scheme or self.draft.cutter.by_order:
            return False
        located = None if asked.include or asked.exclude or asked.drop else run.extents()
        if located is None:
            return False
        self._plain(root, run.names, run.infos, located)
        return True

    def _plain(
        self, root: Path, fqns: Sequence[str], infos: Sequence[TensorInfo], located: Extents
    ) -> None:
        names = list(map(self.names.__getitem__, fqns))
        paths: list[Path] = list(zip(names, strict=True))
        self.draft.plain(
            "model", fqns, [root + p for p in paths] if root else paths, infos, located
        )
        self.written.update(zip(names, each(infos, lambda info: (DENSE, info)), strict=True))

    def _one_by_one(self, root: Path, ties: Mapping[str, str]) -> None:
        """Each on its way; plain ones that follow each other together."""
        dense = {} if self.aim.scheme else self.ckpt.dense()
        run: list[tuple[str, TensorInfo, Extent]] = []

        def placed() -> None:
            if run:
                fqns, infos, places = zip(*run, strict=True)
                self._plain(root, fqns, infos, Extents.of(places))
                run.clear()

        for fqn in self._ordered():
            why = self.asked.excluded(fqn)
            path = (*root, self.names[fqn])
            extent = self.draft.alone(path, dense[fqn]) if why is None and fqn in dense else None
            if why is not None:
                self.draft.dropped[fqn] = why
            elif extent is not None and fqn not in ties:
                run.append((fqn, dense[fqn].info, extent))
            else:
                placed()
                if fqn in ties:
                    self._tie(fqn, ties[fqn])
                else:
                    self._weight(fqn, path)
        placed()

    def _weight(self, fqn: str, path: Path) -> None:
        lazy, encoding, declared = self.ckpt[fqn], None, self.aim.setup.carrier is not None
        if not self._keeps_foreign(fqn, self.foreign):
            scheme = None if fqn in self.beside_ties else self.aim.scheme
            encoding = encoding_for(lazy, scheme, self.options, declared=declared)
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
            if cutter.unit(fqn, self.ckpt[fqn].info) and self.asked.excluded(fqn) is not None
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

    # ------------------------------------------------------------------ ties

    def _declared_ties(self) -> Mapping[str, str]:
        """Tied name -> the name kept, where what lies beside the weights says so."""
        carrier = self.aim.setup.carrier
        translation = self.ckpt.translation
        if carrier is None or (translation is not None and not translation.in_hub_names):
            return {}  # a config.json speaks of the hub's names; another scheme has ties of its own
        infos = {
            fqn: self.ckpt.group(fqn).info for fqn in self.ckpt if self.asked.excluded(fqn) is None
        }
        ties = carrier.ties(infos, self.siblings, self.options.config_from)
        return {
            fqn: kept
            for fqn, kept in ties.items()
            if fqn not in self.ckpt.untied
            if self.ckpt.group(fqn).encoding == self.ckpt.group(kept).encoding
        }

    def _tie(self, fqn: str, kept: str) -> None:
        """Left out because the config ties it; its bytes must equal the kept tensor's."""
        lazy, other = self.ckpt[fqn], self.ckpt[kept]
        self.draft.tied[fqn] = kept
        self.draft.must_equal(other, lazy, f"{fqn} (tied to {kept})", APART)

    def _carried(self) -> dict[str, CarriedFile]:
        carrier = self.aim.setup.carrier
        if carrier is None:
            self.draft.notes += self._config_stays()
            return dict(self.kept.files)
        infos = [form.info for form in distinct(self.draft.out.forms).values()]
        dtypes = {info.dtype for info in infos if info.dtype in FLOATING and len(info.shape) > 1}
        quantized = self._quantized()
        carried, notes = carrier.files(
            self.siblings, self.options.config_from, sorted(dtypes), quantized, self.ckpt.untied
        )
        self.draft.notes += [*notes, *quantized.unread(), *unknown_to_transformers(self.names)]
        return {**carried, **self.kept.files}

    def _config_stays(self) -> list[str]:
        """It is carried by a setup that has a place for it; else it may only have told names."""
        given, setup = self.options.config_from, self.aim.setup.name
        if given is None or self.ckpt.translation is not None:
            return []
        return [f"--config-from {given}: is not carried over, {setup} holds no config.json"]

    def _quantized(self) -> WrittenWeights:
        schemes = {scheme.name: scheme for scheme in registry.schemes()}
        fresh = any(step.encoding.name != "dense" for step, _ in self.draft.encodes)
        keep = self.aim.scheme is None or bool(self.foreign)
        foreign = {} if self.draft.unresolved else self.foreign
        kept = {fqn: name for fqn, name in foreign.items() if fqn not in self.draft.dropped}
        dense = set(self.ckpt.encodings) <= {"dense"}
        return WrittenWeights(self.written, fresh, keep, schemes, kept, dense)
