"""A plain `ckptmap inspect PATH`, run without typer.

Typer takes longer to import than most headers take to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .printer import Printer


def show(
    path: str,
    keys: str,
    root: str | None,
    json: bool,
    like: str | None = None,
    shards: bool = False,
    names: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Print the report of a checkpoint, or with `shards` that of its files; `names` has the prefixes
    and patterns that change its names."""
    import ckptmap
    from ckptmap.operations.inspect import InspectReport
    from ckptmap.storage.hub.resolve import origins_in_errors

    opened = ckptmap.open(path, root=root, like=like, **names)
    with opened as ckpt, origins_in_errors(ckpt.files.mounts):
        if not shards:
            Printer(json).show(InspectReport(ckpt, keys))
            return
        from ckptmap.operations.shards import ShardsReport

        Printer(json).show(ShardsReport(ckpt, keys))


def ran_plain_inspect(args: Sequence[str]) -> bool:
    """Run `inspect PATH [--json]` without a parser; return False where there is more to parse."""
    rest = [arg for arg in args[1:] if arg != "--json"]
    if list(args[:1]) != ["inspect"] or len(rest) != 1 or rest[0].startswith("-"):
        return False
    show(rest[0], "*", None, "--json" in args)
    return True
