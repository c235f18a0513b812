"""A plan made again: with exact scales for tensors that turned out to need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from glob import escape

from ckptmap.planning import plan
from ckptmap.plans import Plan


def with_exact_scales(made: Plan, fqns: Sequence[str]) -> Plan | None:
    """The plan with exact scales for these tensors, too; None: they have them, or cannot."""
    patterns = tuple(escape(fqn) for fqn in fqns)
    options = replace(made.options, exact_scales=(*made.options.exact_scales, *patterns))
    finer = plan(made.ckpt, made.options.to, options=options)
    before = {step.tensor.fqn: step.encoding for step in made.encodes}
    after = {step.tensor.fqn: step.encoding for step in finer.encodes}
    if not fqns or any(before[fqn] == after[fqn] for fqn in fqns):
        return None
    note = (
        f"{fqns[0]}{f' and {len(fqns) - 1} more' if len(fqns) > 1 else ''}: scales are kept exactly,"
        " since outliers would have made others zero or of another sign"
    )
    return replace(finer, notes=(*finer.notes, note))
