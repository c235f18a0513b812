"""plan(): from a checkpoint and `--to` to a Plan, from headers alone.

    source -> selection -> names -> encodings -> optimizer state -> layout -> carried files -> files

Each stage is one module of this room: it takes what the stages before it returned, and returns a
frozen value with remarks for the user.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Unpack

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.module_extra_state import buffer_notes
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.signatures import spelled_out
from ckptmap.planning.carried_files import carried_files
from ckptmap.planning.config_names import config_names
from ckptmap.planning.encoding_remarks import encoding_remarks
from ckptmap.planning.file_layout import file_layout
from ckptmap.planning.flat_param_order import with_units
from ckptmap.planning.foreign_records import foreign_records
from ckptmap.planning.kept_layout import moved
from ckptmap.planning.key_selection import select
from ckptmap.planning.optimizer_state import OptimizerState, optimizer_state
from ckptmap.planning.options import OptionKeywords, Options, options_from
from ckptmap.planning.output_names import output_names
from ckptmap.planning.output_sharding import OutputSharding
from ckptmap.planning.plan import Plan
from ckptmap.planning.prefix_notes import prefix_notes
from ckptmap.planning.reference import (
    aim_of,
    beside,
    open_reference,
    require_one,
)
from ckptmap.planning.remarks import Remarks
from ckptmap.planning.request import Request
from ckptmap.planning.source import PlanSource, open_source
from ckptmap.planning.tensor_layout import tensor_layout
from ckptmap.planning.unmatched_patterns import require_matches
from ckptmap.planning.weight_encodings import weight_encodings
from ckptmap.storage.files import Files
from ckptmap.storage.hub.resolve import errors_by_given_path
from ckptmap.typed_options import as_given


@spelled_out(Options)
def plan(
    source: str | os.PathLike[str] | Checkpoint,
    to: str = "",
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
    require_one(options)
    if isinstance(source, Checkpoint):
        return _plan_with(source.files, source, options)
    files = Files()
    try:
        return _plan_with(files, source, options)
    except BaseException:
        files.close()
        raise


def plan_with_unchanged(first: Plan, unchanged: frozenset[str]) -> Plan:
    """Return the plan with these weights as the bytes of the checkpoint of --as."""
    assert first.reference is not None, "it was made with --as"
    reference, mounts = replace(first.reference, unchanged=unchanged), first.ckpt.files.mounts
    with errors_by_given_path(mounts), paused_gc():
        resolved = reference.options(first.options.located(mounts))
        request = Request(first.ckpt, first.aim, resolved, reference)
        return replace(_plan_stages(PlanSource(first.ckpt), request), options=first.options)


def _plan_with(files: Files, source: str | os.PathLike[str] | Checkpoint, options: Options) -> Plan:
    """Return the plan; `files` read the source, and what the options name beside it."""
    located = options.located(files.mounts)
    with errors_by_given_path(files.mounts):
        reference = open_reference(located, files)
        aim = aim_of(located, reference)
        chosen = located if reference is None else reference.options(located)
        resolved = with_units(chosen, aim.setup, files.mounts)
        opened = open_source(source, resolved, aim, files, reference)
        if reference is not None:
            opened = replace(opened, ckpt=beside(opened.ckpt, reference))
        with paused_gc():
            new_plan = _plan_stages(opened, Request(opened.ckpt, aim, resolved, reference))
    if resolved is options:
        return new_plan
    return replace(new_plan, options=resolved.with_paths_of(options))


def _plan_stages(source: PlanSource, request: Request) -> Plan:
    """Run the stages in their order."""
    ckpt = request.ckpt
    sharding = OutputSharding(ckpt, request.setup, request.options)
    selection = select(request, sharding)
    names = output_names(request, selection)
    fit = config_names(request, selection, names)
    encodings = weight_encodings(request, selection)
    optimizer = OptimizerState()
    if selection.optimizer:
        optimizer = optimizer_state(request, sharding, selection.remarks.dropped, names.kept)
    layout = tensor_layout(request, sharding, names, selection, encodings, optimizer)
    remarks = selection.remarks + fit + encodings.remarks + optimizer.remarks
    remarks += Remarks(
        notes=[*names.notes, *buffer_notes(selection.values), *prefix_notes(request)]
    )
    carried = carried_files(request, selection, names, encodings, layout, remarks)
    remarks += carried.remarks
    require_matches(request, layout.steps.fqns, remarks.dropped)
    remarks += encoding_remarks(request, layout, encodings, remarks.dropped, layout.tied)
    values = {names.of_extra(path): value for path, value in selection.values.items()}
    records = {**layout.records, **foreign_records(ckpt, names, encodings)}
    if request.reference is not None and request.reference.needs_no_records:
        records = {}
    files, encodes = file_layout(
        request, layout, {**optimizer.values, **values}, records, sharding.world_size, carried.stem,
        carried.inner,
    )  # fmt: skip
    entries = (*selection.values, *selection.others) if request.setup.holds_extra else ()
    notes = [*selection.copied.source_notes(ckpt, carried.files), *source.notes, *remarks.notes]
    return Plan(
        ckpt, request.aim, request.options, sharding.world_size, layout.steps, files, encodes,
        [*source.compares, *layout.compares], carried.files, remarks.dropped, layout.tied,
        [replace(one, hint=as_given(one.hint)) for one in remarks.unresolved],
        layout.keys, records, request.fingerprints,
        tuple(as_given(ckpt.files.mounts.with_origins(note)) for note in notes),
        moved(request, names.root, names.places(entries)),
        request.reference,
    )  # fmt: skip
