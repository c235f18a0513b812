"""Say what keeps the names of a source from being those that transformers loads, and the options that change
them: a prefix, or the scheme of another library."""

from __future__ import annotations

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.mapping.detect import known_below, recognise
from ckptmap.mapping.prefixes import PrefixChange, averaged_model
from ckptmap.planning.options import Options
from ckptmap.planning.request import Request
from ckptmap.protocols import Setup

HUB = "--names hf"
"""The option that writes the names of transformers."""


def prefix_notes(request: Request) -> list[str]:
    """Return a note where the names are those of a model below a prefix, or of another library."""
    ckpt, setup, options = request.ckpt, request.setup, request.options
    change = prefix_change(ckpt, setup, options)
    if change is not None:
        return [
            f"names: {change.matched} of {change.wanted} begin with '{change.old}.', and are known without"
            f" it: add {change.options}"
        ]
    scheme = foreign_scheme(ckpt, setup, options)
    return (
        [f"names: those of {scheme}, which transformers does not load: add {HUB}"] if scheme else []
    )


def prefix_change(ckpt: Checkpoint, setup: Setup, options: Options) -> PrefixChange | None:
    """Return the change of a prefix that makes names known; None: they are known, or were changed by options.

    That of torch's AveragedModel counts for every setup; others where a library loads the output by
    plain names, since the library would initialize at random what it does not find.
    """
    if _are_chosen(ckpt, options):
        return None
    names = list(ckpt)
    change = averaged_model(names)
    if change is None and setup.carrier is not None and not recognise(names):
        change = known_below(names)
    return change


def foreign_scheme(ckpt: Checkpoint, setup: Setup, options: Options) -> str:
    """Return the scheme of the names where transformers has others for the model, and no option changed them;
    "" where it loads them, or nothing is known of them."""
    if setup.carrier is None or _are_chosen(ckpt, options):
        return ""
    found = recognise(list(ckpt))
    known = any(entry.title.partition("/")[2].split("-")[0] == "hf" for entry in found)
    return "" if known or not found else found[0].title_with_aliases


def _are_chosen(ckpt: Checkpoint, options: Options) -> bool:
    """Return whether an option says what the names are."""
    changed = ckpt.renamings or ckpt.translation is not None or options.names_like is not None
    return bool(changed)
