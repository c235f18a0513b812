"""A `Plan`: what a conversion will do, decided from headers before a byte moves.

It can be printed, saved as JSON, and executed. Its digest stands for all that it does: the output of
an interrupted run is continued only under the same digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path as FilePath
from typing import Unpack

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core import argument_checks
from ckptmap.core.columns import each
from ckptmap.core.formatting import counted, human, some
from ckptmap.core.printable import as_lines
from ckptmap.core.short_repr import short
from ckptmap.core.signatures import spelled_out
from ckptmap.core.tensor_table import TensorSummary, listed, renamed, table
from ckptmap.errors import DestinationError, PlanError
from ckptmap.planning.conversion import Conversion, Steps
from ckptmap.planning.file_plan import Compare, Encode, FilePlan
from ckptmap.planning.options import (
    Options,
    RunOptionKeywords,
    RunOptions,
    run_options_from,
)
from ckptmap.planning.reference import Reference
from ckptmap.planning.remarks import Unresolved, leave_behind
from ckptmap.planning.report import Report
from ckptmap.protocols import CarriedFile
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.protocols.writing import SHARD_NBYTES
from ckptmap.setups import Aim
from ckptmap.version import __version__

SCHEMA = 1
CARRIED_SHOWN = 12
"""Files beside the weights that the text of a plan names; random states are a file a rank."""
BATCH = 1000
"""Lines that are hashed at once."""
PATH_OPTIONS = ("names_like", "config_from", "like", "base", "tp_plan", "as_")
"""Options that the digest leaves out: a path is not the same on every machine, and what it decides
shows in the rest of the plan."""
LATER_OPTIONS = ("strip_prefix", "add_prefix", "rename", "keep_layout", "as_")
"""Options that the digest leaves out where they are not used: a plan without them has the digest
that it had before they came."""
FIDELITIES = ("bytes", "exact", "codes", "cast", "quantize", "requantize")
"""From lossless to lossy."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Every key of the source is used, dropped with a reason, or unresolved; every byte of the output
    has its place.

    steps         logical tensors, and how each is converted
    files         the output's files, with the source of each slot
    encodes       tensors that are encoded anew
    compares      replicas and ties that must hold the same bytes
    carried       files beside the weights, by name: config.json, tokenizer
    dropped       source key -> why it is not in the output
    tied          FQN that is not written by itself -> the weight that holds its bytes
    keys          path in the output -> logical FQN
    records       dotted key in the output -> how the tensor is encoded
    moved         entries that lie elsewhere than in the source: "epoch -> extra.epoch"
    fingerprints  size and time of change of each file of the source
    """

    ckpt: Checkpoint
    aim: Aim
    options: Options
    world_size: int
    steps: Steps
    files: Sequence[FilePlan]
    encodes: Sequence[Encode]
    compares: Sequence[Compare]
    carried: Mapping[str, CarriedFile]
    dropped: Mapping[str, str]
    tied: Mapping[str, str]
    unresolved: Sequence[Unresolved]
    keys: Mapping[tuple[str | int, ...], str]
    records: Mapping[str, Mapping[str, object]]
    fingerprints: Mapping[str, Fingerprint]
    notes: Sequence[str] = ()
    moved: str = ""
    reference: Reference | None = None
    """The checkpoint of --as, which the output is like."""
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self._digest())

    @cached_property
    def _counts(self) -> Mapping[Conversion, int]:
        """How many tensors are converted in each way."""
        return self.steps.counted()

    @property
    def nbytes_in(self) -> int:
        return sum(kind.nbytes_in * count for kind, count in self._counts.items())

    @property
    def nbytes_out(self) -> int:
        carried = sum(file.nbytes for file in self.carried.values())
        return carried + sum(file.out.nbytes for file in self.files)

    @property
    def one_file(self) -> bool:
        """Whether the output is one file that holds its own manifest."""
        return len(self.files) == 1 and self.files[0].out.holds_manifest

    def _digest(self) -> str:
        """Return a SHA-256, the same on every machine for the same source and options."""
        seen = hashlib.sha256()
        options = {**asdict(self.options), **dict.fromkeys(PATH_OPTIONS)}
        options["optimizer_keys"] = self.options.optimizer_keys or "fqn"
        options["max_shard_nbytes"] = self.options.max_shard_nbytes or SHARD_NBYTES
        options = {k: v for k, v in options.items() if v or k not in LATER_OPTIONS}
        seen.update(json.dumps([__version__, SCHEMA, options, self.world_size]).encode())
        if self.ckpt.renamings:
            seen.update(json.dumps([one.record() for one in self.ckpt.renamings]).encode())
        if self.ckpt.translated is not None:
            seen.update(json.dumps(self.ckpt.translated).encode())
        for name, file_mark in sorted(self._source_files().items()):
            line = f"{name} {file_mark.nbytes} {file_mark.mtime_ns}\n"
            seen.update(line.encode(errors="surrogateescape"))
        kinds = each(self.steps.conversions, _digested)
        for lines in _lines(self.steps.fqns, kinds):
            seen.update(lines)
        for file in self.files:
            seen.update(f"{file.out.name} {file.out.nbytes}\n{file.out.mark}".encode())
            slots = file.slots
            boxes = each(slots.boxes, str)
            for lines in _lines(slots.paths, boxes, slots.offsets, slots.sizes):
                seen.update(lines)
        for name, carried in self.carried.items():
            seen.update(f"{name} {carried.mark}\n".encode(errors="surrogateescape"))
        return seen.hexdigest()

    def _source_files(self) -> dict[str, Fingerprint]:
        """Return the fingerprint of each file by its path below the source, if it is below it."""
        base = FilePath(self.ckpt.path)
        base = base if base.is_dir() else base.parent
        named: dict[str, Fingerprint] = {}
        for file, fingerprint in self.fingerprints.items():
            path = FilePath(file)
            if path.is_relative_to(base):
                file = str(path.relative_to(base))
            named[file] = fingerprint
        return named

    def require_resolved(self) -> None:
        """Raise PlanError CKM202 where a key is unresolved; it names the first and counts the others."""
        if not self.unresolved:
            return
        first, others = self.unresolved[0], len(self.unresolved) - 1
        more = f" (and {others} more)" if others else ""
        hint = first.hint
        if others and all(item.option for item in self.unresolved):
            hint = leave_behind([item.key for item in self.unresolved])
        raise PlanError("CKM202", f"{first.key}: {first.reason}{more}", hint)

    @spelled_out(RunOptions)
    def execute(
        self,
        dst: str | os.PathLike[str],
        **keywords: Unpack[RunOptionKeywords],
    ) -> Report:
        """Run the plan into `dst`. Keyword arguments are the fields of `RunOptions`.

        Raises as `convert` does.
        """
        how = run_options_from(keywords, "Plan.execute()")
        report: Report = registry.runner()(self, dst, how)
        return report

    def to_json(self) -> dict[str, object]:
        """Return one JSON document, `"schema": 1`; entries are in the order of the output."""
        return {
            "schema": SCHEMA,
            "ckptmap": __version__,
            "digest": self.digest,
            "source": {
                "path": self.ckpt.shown,
                "container": self.ckpt.index.container,
                "setup": self.ckpt.setup,
                "files": {name: asdict(mark) for name, mark in self._source_files().items()},
            },
            "options": asdict(self.options),
            "world_size": self.world_size,
            "steps": [{"fqn": fqn, **kind._asdict()} for fqn, kind in self.steps],
            "from": self._origins(),
            "files": [
                {"name": f.out.name, "nbytes": f.out.nbytes, "tensors": len(f.out.slots)}
                for f in self.files
            ],
            "carried": sorted(self.carried),
            "dropped": dict(self.dropped),
            "tied": dict(self.tied),
            "unresolved": [asdict(item) for item in self.unresolved],
            "moved": self.moved,
            "notes": list(self.notes),
            "totals": {
                "tensors": len(self.steps),
                "nbytes_in": self.nbytes_in,
                "nbytes_out": self.nbytes_out,
                "fidelity": self.fidelities(),
            },
        }

    def _origins(self) -> dict[str, tuple[str, ...]]:
        """Return the keys in the source of each weight that is written under another name."""
        origins = self.ckpt.origins
        if not origins:
            return {}
        kept = set(self.steps.weights())
        return {fqn: keys for fqn, keys in origins.items() if fqn in kept}

    def fidelities(self) -> dict[str, int]:
        """Return how many tensors have each fidelity, from lossless to lossy."""
        counts: Counter[str] = Counter()
        for kind, count in self._counts.items():
            counts[kind.fidelity] += count
        return {name: counts[name] for name in FIDELITIES if counts[name]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, for `convert --plan`. Raises DestinationError CKM304 where the file
        cannot be written."""
        argument_checks.path("path", path)
        text = json.dumps(self.to_json(), indent=1) + "\n"
        try:
            FilePath(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise DestinationError(
                "CKM304",
                f"{path}: cannot be written: {(error.strerror or str(error)).lower()}",
                "name a file in a directory that can be written",
            ) from error

    def __repr__(self) -> str:
        kinds = [f"{name} {count:,}" for name, count in self.fidelities().items()]
        open_keys = [f"{len(self.unresolved):,} unresolved"] if self.unresolved else []
        return (
            f"Plan({short(self.ckpt.shown)} -> {self.aim.text}, {counted(len(self.steps), 'tensor')},"
            f" {human(self.nbytes_in)} -> {human(self.nbytes_out)}, {', '.join([*kinds, *open_keys])})"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows of it."""
        return registry.card(self)

    def __str__(self) -> str:
        lines = [
            f"{self.ckpt.shown}  ({self.ckpt.setup}, {counted(self.ckpt.world_size, 'rank')})"
            f" -> {self.aim.text}, {counted(self.world_size, 'rank')}",
            *table(self.steps.fqns, each(self.steps.conversions, _summary)),
        ]
        lines += renamed(self._origins(), stripped=self.ckpt.translated is None)
        lines += listed("dropped", self.dropped)
        lines += listed("tied", self.tied)
        if self.carried:
            lines.append(f"carried: {some(sorted(self.carried), CARRIED_SHOWN)}")
        lines += [f"moved: {self.moved}"] if self.moved else []
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"unresolved: {u.key}: {u.reason}; {u.hint}" for u in self.unresolved]
        kinds = ", ".join(f"{name} {count}" for name, count in self.fidelities().items())
        lines.append(
            f"total: {counted(len(self.steps), 'tensor')}, {human(self.nbytes_in)} ->"
            f" {human(self.nbytes_out)} in {counted(len(self.files), 'file')};"
            f" {kinds or 'nothing'}"
        )
        return as_lines(lines)


def _digested(conversion: Conversion) -> str:
    """Return what the digest covers of a conversion; the rest follows from the source's headers."""
    return str((conversion.source, conversion.target, conversion.fidelity))


def _summary(conversion: Conversion) -> TensorSummary:
    """Return what the table shows of a conversion."""
    kind = (conversion.source, "->", conversion.target)
    return TensorSummary(
        conversion.role, conversion.shape, kind, conversion.fidelity, conversion.nbytes_out
    )


def _lines(*columns: Sequence[object]) -> Iterator[bytes]:
    """Yield one line a row of the columns, with a space between its values, a batch at a time."""
    line = " ".join(["%s"] * len(columns)) + "\n"
    for at in range(0, len(columns[0]), BATCH):
        rows = list(zip(*[column[at : at + BATCH] for column in columns], strict=True))
        yield (line * len(rows) % (*chain.from_iterable(rows),)).encode()
