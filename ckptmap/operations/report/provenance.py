"""Where a checkpoint comes from, and what it holds beside weights: rows of facts for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import counted, human
from ckptmap.core.printable import one_line
from ckptmap.operations.inspect import InspectReport
from ckptmap.operations.report.collect import Tensors, shown_name
from ckptmap.operations.report.verdict import Manifest, world_size_in
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.manifest_schema import ManifestDocument

FILES = 40
"""Files that the page lists."""
GROUPS = 24
"""Parameter groups that the page lists."""


@dataclass(frozen=True)
class StateRow:
    """Optimizer state of one name: `exp_avg` of 291 parameters in float32."""

    name: str
    count: int
    dtype: str
    encoding: str
    size: str


@dataclass(frozen=True)
class OptimizerFacts:
    """The optimizer state. `groups` are hyper-parameters as text, one a group."""

    line: str
    states: Sequence[StateRow]
    groups: Sequence[str]


def optimizer_facts(facts: InspectReport) -> OptimizerFacts | None:
    """Return the optimizer state by name and group; None: there is none."""
    line = facts.optimizer_line()
    if not line:
        return None
    rows: dict[tuple[str, str, str], list[int]] = {}
    named = {} if facts.ckpt.optimizer_by_index else facts.ckpt.optimizer
    for of_parameter in named.values():
        for name, lazy in of_parameter.items():
            row = rows.setdefault((name, lazy.dtype, lazy.encoding), [0, 0])
            row[0] += 1
            row[1] += lazy.nbytes
    states = [
        StateRow(shown_name(name), count, dtype, encoding, human(nbytes))
        for (name, dtype, encoding), (count, nbytes) in rows.items()
    ]
    groups = [] if facts.ckpt.optimizer_by_index else facts.ckpt.optimizer_groups
    lines = [_group(number, group) for number, group in enumerate(groups[:GROUPS])]
    lines += [f"and {counted(len(groups) - GROUPS, 'more group')}"] if len(groups) > GROUPS else []
    return OptimizerFacts(one_line(line), states, lines)


def _group(number: int, group: Mapping[str, object]) -> str:
    values = [
        f"{name} {_short(value)}"
        for name, value in group.items()
        if name not in ("params", "param_names") and value is not None and value is not False
    ]
    parameters = group.get("params", ())
    count = counted(len(parameters) if isinstance(parameters, Sequence) else 0, "parameter")
    return shown_name(f"group {number}: {count}; {', '.join(values)}")


def _short(value: object) -> str:
    text = "a tensor" if isinstance(value, LazyTensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def provenance(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what the manifest says, by name."""
    document = manifest.document
    if document is None:
        return []
    return [(name, shown_name(text)) for name, text in _statements(document)]


def _statements(document: ManifestDocument) -> Iterator[tuple[str, str]]:
    yield "written by", f"ckptmap {document['ckptmap']}"
    yield "setup", f"{document['setup']}, {counted(world_size_in(document), 'rank')}"
    source = document["source"]
    if isinstance(source, Mapping):
        yield "source", ", ".join(f"{name} {value}" for name, value in source.items())
    yield "plan", str(document["plan"])
    for name, noun in (("dropped", "key"), ("tied", "name"), ("carried", "file")):
        entries = document.get(name)
        if isinstance(entries, Mapping) and entries:
            first = ", ".join(list(entries)[:5])
            yield name, f"{counted(len(entries), noun)}: {first}"
    if document.get("merged"):
        yield "merged", "a LoRA adapter was merged into it"


def file_rows(ckpt: Checkpoint) -> list[tuple[str, str]]:
    """Return the files of a checkpoint with their sizes."""
    rows = []
    for file in ckpt.index.files[:FILES]:
        mark = ckpt.fingerprints.get(file)
        rows.append((shown_name(file), "" if mark is None else human(mark.nbytes)))
    more = len(ckpt.index.files) - FILES
    return [*rows, *([(f"and {more:,} more", "")] if more > 0 else [])]


def dtype_bars(tensors: Tensors) -> list[tuple[str, int, int]]:
    """Return (kind, tensors, bytes) of every dtype and encoding, most bytes first."""
    totals: dict[str, list[int]] = {}
    counts = [0] * len(tensors.kinds)
    for number in tensors.kind_of:
        counts[number] += 1
    for number, kind in enumerate(tensors.kinds):
        name = kind.dtype if kind.encoding == "dense" else f"{kind.encoding} ({kind.dtype})"
        total = totals.setdefault(name, [0, 0])
        total[0] += counts[number]
        total[1] += counts[number] * kind.nbytes
    rows = [(name, count, nbytes) for name, (count, nbytes) in totals.items()]
    return sorted(rows, key=lambda row: -row[2])
