"""report(): one HTML file that shows a checkpoint; nothing in it is fetched, and no name in it can run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Unpack

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.compare_tensors import Difference
from ckptmap.checkpoint.open import open, open_another
from ckptmap.checkpoint.rename import renamed
from ckptmap.core import argument_checks
from ckptmap.core.formatting import counted, human
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.printable import one_line
from ckptmap.core.signatures import spelled_out
from ckptmap.errors import ArgumentError, CkptmapError, PlanError
from ckptmap.operations.diff import DiffReport, compare, with_prefix_told
from ckptmap.operations.inspect import InspectReport
from ckptmap.operations.report import html, provenance
from ckptmap.operations.report.collect import Tensors, collect, shown_name
from ckptmap.operations.report.differences import Differences, differences
from ckptmap.operations.report.error_map import TensorError, error_map, errors_of_plan, measured
from ckptmap.operations.report.flow import flow
from ckptmap.operations.report.shard_map import ShardMap, shard_map
from ckptmap.operations.report.verdict import (
    WRONG,
    Finding,
    Manifest,
    Verdict,
    read,
    verdict,
)
from ckptmap.operations.shards import ShardsReport
from ckptmap.planning.options import OptionKeywords, Options, options_from
from ckptmap.planning.plan import Plan
from ckptmap.planning.planner import plan as make_plan
from ckptmap.setups import parse
from ckptmap.storage.hub.resolve import origins_in_errors
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.resource_limits import named_if_unreadable
from ckptmap.typed_options import as_given
from ckptmap.version import __version__

ELSEWHERE = ("dtypes", "encodings", "refused", "note", "optimizer")
"""Facts that other parts of the page show."""
OF_SOURCE = (
    "to", "source_root", "like", "param_order", "strip_prefix", "rename", "add_prefix",
)  # fmt: skip
"""Options that tell how a checkpoint is read."""
PATTERNS = 400
"""Lines of the folded table that a reader without scripts sees."""


@dataclass(frozen=True)
class Contents:
    """What the page of one checkpoint shows."""

    ckpt: Checkpoint
    facts: InspectReport
    tensors: Tensors
    shards: ShardMap
    manifest: Manifest
    plans: Sequence[Plan]
    compared: Differences | None
    errors: Sequence[Mapping[str, object]]
    verdict: Verdict


@spelled_out(Options)
def report(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    against: str | os.PathLike[str] | Checkpoint | None = None,
    to: str | Sequence[str] | None = None,
    values: bool | None = None,
    **keywords: Unpack[OptionKeywords],
) -> str:
    """Return one HTML file that shows a checkpoint: what it is, what is wrong, where its bytes lie.

    against  another checkpoint: what differs, with the worst tensors
    to       a setup, or several: what a conversion would do with every kind of tensor
    values   whether tensors are read: with `against` to compare their values (default: yes), with
             `to` to measure the errors of its encoding (default: no)

    Other keyword arguments are the fields of `Options`; they hold for `path` and `to`. Without
    values it reads headers only. Nothing is written. Raises SourceError where a path is no
    checkpoint, PlanError where `to` is no setup, ArgumentError CKM516 for an option of a conversion without `to`; a conversion that is refused is told in the page.
    """
    aims = list(argument_checks.patterns("to", () if to is None else to))
    options = options_from(aims[0] if aims else "", keywords, "report()")
    _require_use(options, values, bool(aims), against is not None)
    with ExitStack() as stack:
        stack.enter_context(named_if_unreadable())
        ckpt = path if isinstance(path, Checkpoint) else stack.enter_context(_opened(path, options))
        other = against
        if other is not None and not isinstance(other, Checkpoint):
            other = stack.enter_context(open_another(other))
        for each in (ckpt, other):
            if each is not None:
                stack.enter_context(origins_in_errors(each.files.mounts))
        with paused_gc():
            contents = _contents(ckpt, other, aims, options, values)
            return html.page(**_sections(contents), data=_data(contents))


def _require_use(options: Options, values: bool | None, aims: bool, against: bool) -> None:
    """Raise ArgumentError CKM516 where an option of a conversion is given, and no conversion."""
    given = [
        f"--{field.name.rstrip('_').replace('_', '-')}"
        for field in fields(Options)
        if field.name not in OF_SOURCE and getattr(options, field.name) != field.default
    ]
    given += ["--values"] if values is not None and not against else []
    if given and not aims:
        raise ArgumentError(
            "CKM516",
            f"report(): {given[0]} says how a conversion is shown, and none is asked for",
            f"give --to SETUP, or leave out {given[0]}",
        )


def _opened(path: str | os.PathLike[str], options: Options) -> Checkpoint:
    return open(path, root=options.source_root, like=options.like, param_order=options.param_order)


def _contents(
    ckpt: Checkpoint,
    other: Checkpoint | None,
    aims: Sequence[str],
    options: Options,
    values: bool | None,
) -> Contents:
    plans, refused = _plans(ckpt, aims, options)  # they change names themselves
    ckpt = renamed(ckpt, options.renaming)
    facts = InspectReport(ckpt)
    tensors = collect(facts)
    shards = shard_map(ShardsReport(ckpt), tensors)
    manifest = read(ckpt)
    errors: list[Mapping[str, object]] = []
    compared = None
    if other is not None:
        diffed, found = _compared(ckpt, other, values is not False)
        diffed = diffed if options.renaming else with_prefix_told(diffed, ckpt, other)
        compared = differences(diffed, found)
        found = {name: error for name, error in found.items() if error.count}
        errors += [error_map(f"against {shown_name(other.shown)}", found)] if found else []
    for plan in plans if values else ():
        found, unmeasured = errors_of_plan(plan)
        refused += [_finding(plan.aim.text, error, fqn) for fqn, error in unmeasured.items()]
        errors += [error_map(as_given(f"--to {plan.aim.text}"), found)] if found else []
    size = (len(tensors.names), tensors.nbytes)
    judged = verdict(ckpt, facts.notes, size, manifest, shards, plans, compared, refused)
    return Contents(ckpt, facts, tensors, shards, manifest, plans, compared, errors, judged)


def _plans(
    ckpt: Checkpoint, aims: Sequence[str], options: Options
) -> tuple[list[Plan], list[Finding]]:
    """Return the plan for each setup, and a finding for each that cannot be planned."""
    plans, refused = [], []
    for aim in aims:
        parse(aim)  # a setup that does not exist is no finding about the checkpoint
        try:
            plans.append(make_plan(ckpt, aim, options=replace(options, to=aim)))
        except PlanError as error:
            refused.append(_finding(aim, error))
    return plans, refused


def _finding(aim: str, error: CkptmapError, fqn: str = "") -> Finding:
    """Return what keeps a conversion, or one tensor of it, from being done."""
    where = f"--to {aim}: {fqn}: " if fqn and fqn not in error.message else f"--to {aim}: "
    return Finding(WRONG, one_line(f"{where}{error.message}"), one_line(error.hint))


def _compared(
    a: Checkpoint, b: Checkpoint, values: bool
) -> tuple[DiffReport, dict[str, TensorError]]:
    """Return what differs, and the error of every tensor that was read, by name."""
    errors: dict[str, TensorError] = {}

    def measure(name: str, one: LazyTensor, two: LazyTensor) -> Difference | None:
        differ, errors[name] = measured(one, two)
        return differ

    return compare(a, b, measure if values else None), errors


def _sections(contents: Contents) -> dict[str, object]:
    """Return what the template shows; names in it are escaped there."""
    ckpt, tensors = contents.ckpt, contents.tensors
    bars = provenance.dtype_bars(tensors)
    return {
        "version": __version__,
        "verdict": contents.verdict,
        "facts": [fact for fact in contents.facts.facts() if fact[0] not in ELSEWHERE],
        "tiles": list(_tiles(contents)),
        "bars": [
            (name, count, human(nbytes), _share(nbytes, bars)) for name, count, nbytes in bars
        ],
        "patterns": list(_patterns(contents.facts)),
        "shards": contents.shards,
        "flows": [(as_given(f"--to {plan.aim.text}"), plan, flow(plan)) for plan in contents.plans],
        "compared": contents.compared,
        "maps": contents.errors,
        "optimizer": provenance.optimizer_facts(contents.facts),
        "provenance": provenance.provenance(contents.manifest),
        "files": provenance.file_rows(ckpt),
    }


def _patterns(facts: InspectReport) -> Iterator[tuple[str, int, str, str, str]]:
    """Yield name, count, shape, kind and size of tensors whose names differ only in numbers."""
    for row in facts.patterns()[:PATTERNS]:
        role = "" if row.look.role == "model" else f"{row.look.role}: "
        kind, shape = " ".join(row.look.kind), str(list(row.look.shape))
        yield shown_name(f"{role}{row.pattern}"), row.count, shape, kind, human(row.nbytes)


def _share(nbytes: int, bars: Sequence[tuple[str, int, int]]) -> float:
    most = max((size for _, _, size in bars), default=0)
    return 100 * nbytes / most if most else 0.0


def _tiles(contents: Contents) -> Iterator[tuple[str, str, str]]:
    """Yield the figures below the verdict: name, value, and a remark."""
    ckpt, tensors = contents.ckpt, contents.tensors
    yield "size", human(tensors.nbytes), counted(len(tensors.names), "tensor")
    yield "parameters", _short_count(contents.facts.numel()), f"{contents.facts.numel():,}"
    yield "files", f"{len(ckpt.index.files):,}", f"{contents.shards.imbalance:.2f} imbalance"
    yield "ranks", f"{ckpt.world_size:,}", "that wrote it"
    yield "layers", f"{len(tensors.layers):,}", "groups of tensors"


def _short_count(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _data(contents: Contents) -> str:
    """Return the JSON that the page's script draws from."""
    document = {
        "tensors": contents.tensors.to_json(),
        "map": contents.shards.data,
        "errors": contents.errors,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)
