"""Say which prefix keeps the names of a source from being known, and the options that take it off."""

from __future__ import annotations

from ckptmap.mapping.detect import known_below, recognise
from ckptmap.mapping.prefixes import averaged_model
from ckptmap.planning.request import Request


def prefix_notes(request: Request) -> list[str]:
    """Return a note where the names are those of a model below a prefix.

    That of torch's AveragedModel is noted for every setup; others where a library loads the output by
    plain names, since the library would initialize at random what it does not find.
    """
    ckpt = request.ckpt
    if ckpt.renamings or ckpt.translation is not None or request.options.names_like is not None:
        return []
    names = list(ckpt)
    change = averaged_model(names)
    if change is None and request.setup.carrier is not None and not recognise(names):
        change = known_below(names)
    if change is None:
        return []
    return [
        f"names: {change.matched} of {change.wanted} begin with '{change.old}.', and are known without"
        f" it: add {change.options}"
    ]
