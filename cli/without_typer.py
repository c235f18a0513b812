"""`ckptmap inspect PATH` and `ckptmap plan SRC --to SETUP`, run without typer, and what they print.

Typer takes longer to import than most headers take to read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptmap.core.printable import join

from .printer import Printer, Shown

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint
    from ckptmap.planning.options import Options


def show(
    path: str,
    keys: str,
    root: str | None,
    json: bool,
    like: str | None = None,
    shards: bool = False,
    names: Mapping[str, Any] = MappingProxyType({}),
    quiet: bool = False,
) -> None:
    """Print the report of a checkpoint, or with `shards` that of its files; `names` has the prefixes
    and patterns that change its names."""
    import ckptmap
    from ckptmap.storage.hub.resolve import origins_in_errors

    with shown_on_a_terminal(quiet):
        opened = ckptmap.open(path, root=root, like=like, **names)
        with opened as ckpt, origins_in_errors(ckpt.files.mounts):
            show_it = Printer(json).prepared(_report(ckpt, keys, shards))
    show_it()


def _report(ckpt: Checkpoint, keys: str, shards: bool) -> Shown:
    if shards:
        from ckptmap.operations.shards import ShardsReport

        return ShardsReport(ckpt, keys)
    from ckptmap.operations.inspect import InspectReport

    return InspectReport(ckpt, keys)


def show_plan(
    src: str, options: Options, json: bool, save: str | None = None, quiet: bool = False
) -> int:
    """Print a plan, and save it as the file `save`; return the exit code."""
    import ckptmap

    out = Printer(json)
    with shown_on_a_terminal(quiet):
        plan = ckptmap.plan(src, options.to, options=options)
        show_it = out.prepared(plan)
    with plan.ckpt:
        if save is not None:
            plan.save(save)
            again = join(("ckptmap", "convert", "--plan", save, src, "DST"))
            out.note(f"saved: {save}; run it with: {again}")
        show_it()
    return int(bool(plan.unresolved))


def shown_on_a_terminal(quiet: bool) -> AbstractContextManager[None]:
    """Return the line of progress; elsewhere nothing, and nothing is imported for it."""
    if quiet or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext()
    from .progress import shown_while_reading

    return shown_while_reading()


def run_without_typer(args: Sequence[str]) -> int | None:
    """Run a command line that holds no more than these two take, and return its exit code; None: there is more to
    parse, which typer does."""
    if not args or args[0] not in ("inspect", "plan"):
        return None
    places = [arg for arg in args[1:] if arg != "--json"]
    to = ""
    if args[0] == "plan" and places.count("--to") == 1 and places[-1] != "--to":
        at = places.index("--to")
        _, to = places.pop(at), places.pop(at)
    if any(arg.startswith("-") for arg in (*places, to)) or len(places) != 1:
        return None
    if args[0] == "inspect":
        show(places[0], "*", None, "--json" in args)
        return 0
    if not to:
        return None
    from ckptmap.planning.options import Options

    return show_plan(places[0], Options(to=to), "--json" in args)
