"""A plain `ckptmap inspect PATH`, run without typer.

Typer takes longer to import than most headers take to read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .printer import Printer, Shown

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint


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


def shown_on_a_terminal(quiet: bool) -> AbstractContextManager[None]:
    """Return the line of progress; elsewhere nothing, and nothing is imported for it."""
    if quiet or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext()
    from .progress import shown_while_reading

    return shown_while_reading()


def ran_plain_inspect(args: Sequence[str]) -> bool:
    """Run `inspect PATH [--json]` without a parser; return False where there is more to parse."""
    rest = [arg for arg in args[1:] if arg != "--json"]
    if list(args[:1]) != ["inspect"] or len(rest) != 1 or rest[0].startswith("-"):
        return False
    show(rest[0], "*", None, "--json" in args)
    return True
