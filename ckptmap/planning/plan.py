"""A Plan: what a conversion will do, decided before a byte moves; printed, saved, then executed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Unpack

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.columns import each
from ckptmap.core.name_table import Look, listed, renamed, table
from ckptmap.core.text import counted, human
from ckptmap.errors import DestinationError, PlanError
from ckptmap.planning.conversion import Conversion, Steps
from ckptmap.planning.file_plan import Compare, Encode, FilePlan
from ckptmap.planning.options import MAX_MEMORY, Options, RunOptionKeywords, run_options_from
from ckptmap.planning.remarks import Unresolved
from ckptmap.planning.report import Report
from ckptmap.protocols import CarriedFile
from ckptmap.setups import Aim
from ckptmap.storage.file_systems import Fingerprint
from ckptmap.version import __version__

if TYPE_CHECKING:
    import os

SCHEMA = 1
BATCH = 1000
"""Lines that are hashed at once."""
SAID = 12
"""Options that a hint gives at most."""


@dataclass(frozen=True)
class Plan:
    """Every source key used, dropped with a reason, or unresolved; every output byte placed."""

    ckpt: Checkpoint
    aim: Aim
    options: Options
    world_size: int
    steps: Steps
    files: Sequence[FilePlan]
    encodes: Sequence[Encode]
    compares: Sequence[Compare]
    carried: Mapping[str, CarriedFile]
    """Files beside the weights, by name: config.json, tokenizer."""
    dropped: Mapping[str, str]
    """Key -> why it is not in the output."""
    tied: Mapping[str, str]
    unresolved: Sequence[Unresolved]
    keys: Mapping[tuple[str | int, ...], str]
    """Stored path in the output -> logical FQN."""
    records: Mapping[str, Mapping[str, Any]]
    fingerprints: Mapping[str, Fingerprint]
    notes: Sequence[str] = ()
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self._digest())

    @property
    def nbytes_in(self) -> int:
        return sum(kind.nbytes_in * count for kind, count in self.steps.counted().items())

    @property
    def nbytes_out(self) -> int:
        return sum(file.out.nbytes for file in self.files) + sum(
            sibling.nbytes for sibling in self.carried.values()
        )

    @property
    def one_file(self) -> bool:
        return len(self.files) == 1 and self.files[0].out.holds_manifest

    def _digest(self) -> str:
        """The same on every machine for the same source and options; changes with either."""
        seen = hashlib.sha256()
        options = {
            **asdict(self.options),
            "names_like": None,
            "config_from": None,
            "like": None,
            "base": None,
            "tp_plan": None,
        }
        seen.update(json.dumps([__version__, SCHEMA, options, self.world_size]).encode())
        if self.ckpt.translated is not None:
            seen.update(json.dumps(self.ckpt.translated).encode())
        for name, mark in sorted(self._sources().items()):
            seen.update(f"{name} {mark.nbytes} {mark.mtime_ns}\n".encode(errors="surrogateescape"))
        kinds = each(self.steps.conversions, _digested)
        for lines in _lines("%s %s\n", self.steps.fqns, kinds):
            seen.update(lines)
        for file in self.files:
            seen.update(f"{file.out.name} {file.out.nbytes}\n".encode())
            slots = file.slots
            boxes = each(slots.boxes, str)
            for lines in _lines("%s %s %s %s\n", slots.paths, boxes, slots.offsets, slots.sizes):
                seen.update(lines)
        for name, sibling in self.carried.items():
            seen.update(f"{name} {sibling.mark}\n".encode(errors="surrogateescape"))
        return seen.hexdigest()

    def _sources(self) -> dict[str, Fingerprint]:
        base = FilePath(self.ckpt.path)
        base = base if base.is_dir() else base.parent
        return {
            str(FilePath(file).relative_to(base))
            if FilePath(file).is_relative_to(base)
            else file: mark
            for file, mark in self.fingerprints.items()
        }

    def require_resolved(self) -> None:
        """Raises PlanError CKM202 that names the first unresolved keys."""
        if self.unresolved:
            first = self.unresolved[0]
            more = f" (and {len(self.unresolved) - 1} more)" if len(self.unresolved) > 1 else ""
            options, hint = [item.option for item in self.unresolved], first.hint
            if 1 < len(options) <= SAID and all(options):
                hint = f"leave them behind with {' '.join(options)}"
            raise PlanError("CKM202", f"{first.key}: {first.reason}{more}", hint)

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

    def to_json(self) -> dict[str, Any]:
        """One JSON document, `"schema": 1`, stable and sorted as the output is."""
        return {
            "schema": SCHEMA,
            "ckptmap": __version__,
            "digest": self.digest,
            "source": {
                "path": self.ckpt.shown,
                "container": self.ckpt.index.container,
                "setup": self.ckpt.setup,
                "files": {name: asdict(mark) for name, mark in self._sources().items()},
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
            "notes": list(self.notes),
            "totals": {
                "tensors": len(self.steps),
                "nbytes_in": self.nbytes_in,
                "nbytes_out": self.nbytes_out,
                "fidelity": self.fidelities(),
            },
        }

    def _origins(self) -> dict[str, tuple[str, ...]]:
        """The keys in the source of what is written under another name."""
        origins = self.ckpt.origins
        if not origins:
            return {}
        kept = set(self.steps.fqns_of("model"))
        return {fqn: keys for fqn, keys in origins.items() if fqn in kept}

    def fidelities(self) -> dict[str, int]:
        """Fidelity -> how many tensors, in the order of loss."""
        order = ("bytes", "exact", "codes", "cast", "quantize", "requantize")
        counts: Counter[str] = Counter()
        for kind, count in self.steps.counted().items():
            counts[kind.fidelity] += count
        return {name: counts[name] for name in order if counts[name]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, for `convert --plan`. Raises DestinationError CKM304 where it cannot."""
        text = json.dumps(self.to_json(), indent=1) + "\n"
        try:
            FilePath(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise DestinationError(
                "CKM304",
                f"{path}: cannot be written: {(error.strerror or str(error)).lower()}",
                "name a file in a directory that can be written",
            ) from error

    def __str__(self) -> str:
        lines = [
            f"{self.ckpt.shown}  ({self.ckpt.setup}, {counted(self.ckpt.world_size, 'rank')})"
            f" -> {self.aim.text}, {counted(self.world_size, 'rank')}",
            *table(self.steps.fqns, each(self.steps.conversions, _look)),
        ]
        lines += renamed(self._origins(), stripped=self.ckpt.translated is None)
        for title, found in (("dropped", self.dropped), ("tied", self.tied)):
            lines += listed(title, found)
        lines += [f"carried: {', '.join(sorted(self.carried))}"] if self.carried else []
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"unresolved: {u.key}: {u.reason}; {u.hint}" for u in self.unresolved]
        kinds = ", ".join(f"{name} {count}" for name, count in self.fidelities().items())
        lines.append(
            f"total: {counted(len(self.steps), 'tensor')}, {human(self.nbytes_in)} ->"
            f" {human(self.nbytes_out)} in {counted(len(self.files), 'file')};"
            f" {kinds or 'nothing'}; buffers at most --max-memory,"
            f" {human(MAX_MEMORY)} unless given"
        )
        return "\n".join(lines)


def _digested(conversion: Conversion) -> str:
    """Return what the digest covers of a conversion: what follows from the headers is left out."""
    return str((conversion.source, conversion.target, conversion.fidelity))


def _look(conversion: Conversion) -> Look:
    """Return what the table shows of a conversion."""
    kind = (conversion.source, "->", conversion.target)
    return Look(conversion.role, conversion.shape, kind, conversion.fidelity, conversion.nbytes_out)


def _lines(form: str, *columns: Sequence[Any]) -> Iterator[bytes]:
    """A line for what lies side by side in columns, a batch at a time."""
    for at in range(0, len(columns[0]), BATCH):
        some = zip(*[column[at : at + BATCH] for column in columns], strict=True)
        yield "".join(map(form.__mod__, some)).encode()
