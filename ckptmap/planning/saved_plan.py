"""Make a plan again: from the file that `Plan.save` wrote, or with exact scales for some tensors.

A saved plan is not executed as it stands: it is planned again from its options, and the result must
be what the file says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path as FilePath
from shlex import quote
from typing import Any

from ckptmap.core.json_text import parse_json
from ckptmap.errors import PlanError
from ckptmap.planning.options import Options
from ckptmap.planning.plan import SCHEMA, Plan
from ckptmap.planning.planner import plan

OUTCOME = ("world_size", "steps", "files", "dropped", "tied")
"""Entries of a saved plan that follow from its options, and so cannot be edited."""


def with_exact_scales(made: Plan, fqns: Sequence[str]) -> Plan | None:
    """Return the plan with exact scales for these tensors, too.

    None: they have exact scales already, or the encoding has none.
    """
    patterns = tuple(escape(fqn) for fqn in fqns)
    options = replace(made.options, exact_scales=(*made.options.exact_scales, *patterns))
    finer = plan(made.ckpt, made.options.to, options=options)
    before = {step.tensor.fqn: step.encoding for step in made.encodes}
    after = {step.tensor.fqn: step.encoding for step in finer.encodes}
    # One that is not encoded then moves as bytes: its own scales were exact.
    if not fqns or any(before[fqn] == after.get(fqn) for fqn in fqns):
        return None
    more = f" and {len(fqns) - 1} more" if len(fqns) > 1 else ""
    note = (
        f"{fqns[0]}{more}: scales are kept exactly, since outliers would have made others zero or of"
        " another sign"
    )
    return replace(finer, notes=(*finer.notes, note))


def replan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan that `Plan.save` wrote to `path`, planned again from its source.

    Raises PlanError CKM209 where the file is no plan, or is not what would be done now.
    """
    try:
        saved = parse_json(FilePath(path).read_bytes())
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in saved["options"].items()
        }
        options, digest, schema = Options(**given), str(saved["digest"]), saved["schema"]
        source = os.fspath(saved["source"]["path"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        why = f"it has no {error}" if isinstance(error, KeyError) else why
        raise PlanError(
            "CKM209",
            f"{path}: is not a saved plan: {why}",
            "write one with ckptmap plan -o plan.json",
        ) from error
    if schema != SCHEMA:
        raise PlanError(
            "CKM209",
            f"{path}: is a plan of schema {schema!r}, expected {SCHEMA}",
            f"plan again with this ckptmap: ckptmap plan {quote(str(source))} --to {options.to}"
            f" -o {quote(str(path))}",
        )
    made = plan(source, options.to, options=options)
    if made.digest != digest:
        raise PlanError(
            "CKM209",
            f"{path}: {source} is not what was planned on: digest {made.digest[:12]}, expected {digest[:12]}",
            "plan again: the source, ckptmap, or the file's options have changed",
        )
    edited = _edited(saved, made)
    if edited:
        raise PlanError(
            "CKM209",
            f"{path}: {edited!r} is not what its options give: it was edited",
            "options decide what a plan does: plan again with --exclude, --drop, --encode",
        )
    return made


def _edited(saved: Mapping[str, object], made: Plan) -> str:
    """Return the first entry of the file that is not what would be done; empty: all of it is."""
    document = parse_json(json.dumps(made.to_json()))
    return next((name for name in OUTCOME if saved.get(name) != document[name]), "")
