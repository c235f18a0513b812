"""Say which prefix keeps the names of a source from being known, and the options that take it off."""

from __future__ import annotations

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.mapping.detect import known_below, recognise
from ckptmap.mapping.prefixes import PrefixChange, averaged_model
from ckptmap.planning.options import Options
from ckptmap.planning.request import Request
from ckptmap.protocols import Setup


def prefix_notes(request: Request) -> list[str]:
    """Return a note where the names are those of a model below a prefix."""
    change = prefix_change(request.ckpt, request.setup, request.options)
    if change is None:
        return []
    return [
        f"names: {change.matched} of {change.wanted} begin with '{change.old}.', and are known without"
        f" it: add {change.options}"
    ]


def prefix_change(ckpt: Checkpoint, setup: Setup, options: Options) -> PrefixChange | None:
    """Return the change of a prefix that makes names known; None: they are known, or were changed by options.

    That of torch's AveragedModel counts for every setup; others where a library loads the output by
    plain names, since the library would initialize at random what it does not find.
    """
    if ckpt.renamings or ckpt.translation is not None or options.names_like is not None:
        return None
    names = list(ckpt)
    change = averaged_model(names)
    if change is None and setup.carrier is not None and not recognise(names):
        change = known_below(names)
    return change
