"""Make a plan again: from the file that `Plan.save` wrote, with exact scales for some tensors, or to see whether a hint
would work.

A saved plan is not executed as it stands: it is planned again from its options, and the result must
be what the file says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from ckptmap.core.formatting import some
from ckptmap.core.json_text import parse_json
from ckptmap.core.name_globs import only
from ckptmap.core.printable import advised, quote
from ckptmap.errors import PlanError
from ckptmap.planning.options import Options
from ckptmap.planning.plan import SCHEMA, Plan
from ckptmap.planning.planner import plan
from ckptmap.storage.resource_limits import unreadable

OUTCOME = ("world_size", "steps", "files", "dropped", "tied")
"""Entries of a saved plan that follow from its options, and so cannot be edited."""


def with_exact_scales(first_plan: Plan, fqns: Sequence[str]) -> Plan | None:
    """Return the plan with exact scales for these tensors, too.

    None: they have exact scales already, or the encoding has none.
    """
    patterns = tuple(only(fqn) for fqn in fqns)
    options = replace(
        first_plan.options, exact_scales=(*first_plan.options.exact_scales, *patterns)
    )
    exact_plan = plan(first_plan.ckpt, first_plan.options.to, options=options)
    before = {step.tensor.fqn: step.encoding for step in first_plan.encodes}
    after = {step.tensor.fqn: step.encoding for step in exact_plan.encodes}
    # One that is not encoded then moves as bytes: its own scales were exact.
    if not fqns or any(before[fqn] == after.get(fqn) for fqn in fqns):
        return None
    note = (
        f"{some(fqns, 1)}: scales are kept exactly, since outliers would have made others zero or of"
        " another sign"
    )
    return replace(exact_plan, notes=(*exact_plan.notes, note))


def hint_of_values(first_plan: Plan, fqn: str, decoded: bool) -> str | None:
    """Return what to do about values that are not finite where leaving this tensor as it is would be refused, as
    codes that one config.json cannot declare beside the others; None where it would not be.

    decoded  the stored form has values; else its codes alone can be moved
    """
    first = first_plan.options
    patterns = (*first.no_encode, only(fqn))
    try:
        left = plan(first_plan.ckpt, first.to, options=replace(first, no_encode=patterns))
        left.require_resolved()
    except PlanError:
        setup, to = first_plan.aim.setup.name, first_plan.aim.text
        option = advised(no_encode=fqn)
        if decoded:
            return f"decode all weights first, --to {setup}-bf16 (-fp16, -fp32), and from that --to {to} {option}"
        return f"keep its codes where there is no config.json: --to {to.replace(setup, 'full', 1)} {option}"
    return None


def replan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan that `Plan.save` wrote to `path`, planned again from its source.

    Raises PlanError CKM209 where the file is no plan, or is not what would be done now.
    """
    try:
        saved = parse_json(FilePath(path).read_bytes())
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in saved["options"].items()
        }
        options, digest, schema = Options(**fields), str(saved["digest"]), saved["schema"]
        source = os.fspath(saved["source"]["path"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(path, error) from error
        reason = error.strerror if isinstance(error, OSError) else error
        reason = f"it has no {error}" if isinstance(error, KeyError) else reason
        raise PlanError(
            "CKM209",
            f"{path}: is not a saved plan: {reason}",
            "write one with ckptmap plan SRC --to SETUP -o plan.json",
        ) from error
    if schema != SCHEMA:
        raise PlanError(
            "CKM209",
            f"{path}: is a plan of schema {schema!r}, expected {SCHEMA}",
            f"plan again with this ckptmap: ckptmap plan {quote(str(source))} --to {options.to}"
            f" -o {quote(str(path))}",
        )
    new_plan = plan(source, options.to, options=options)
    if new_plan.digest != digest:
        raise PlanError(
            "CKM209",
            f"{path}: {source} is not what was planned on: digest {new_plan.digest[:12]}, expected {digest[:12]}",
            "plan again: the source, ckptmap, or the file's options have changed",
        )
    entry = _first_difference(saved, new_plan)
    if entry:
        raise PlanError(
            "CKM209",
            f"{path}: {entry!r} is not what its options give: it was edited",
            "options decide what a plan does: plan again with --exclude, --drop, --encode",
        )
    return new_plan


def _first_difference(saved: Mapping[str, object], new_plan: Plan) -> str:
    """Return the first entry of the file that is not what would be done; empty: all of it is."""
    document = parse_json(json.dumps(new_plan.to_json()))
    return next((name for name in OUTCOME if saved.get(name) != document[name]), "")
