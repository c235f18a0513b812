"""A plain `inspect`, done without typer: that takes longer to get ready than reading most headers."""

from __future__ import annotations

from collections.abc import Sequence

from .printer import Printer


def show(path: str, keys: str, root: str | None, json: bool, like: str | None = None) -> None:
    """Print a checkpoint's portrait."""
    import ckptmap

    from .inspect_report import InspectReport

    with ckptmap.open(path, root=root, like=like) as ckpt:
        Printer(json).show(InspectReport(ckpt, keys))


def at_once(args: Sequence[str]) -> bool:
    """Do what a plain `inspect PATH [--json]` asks for, without the parser: typer takes longer to
    get ready than reading the headers of most checkpoints. False: it is for the parser."""
    rest = [arg for arg in args[1:] if arg != "--json"]
    if list(args[:1]) != ["inspect"] or len(rest) != 1 or rest[0].startswith("-"):
        return False
    show(rest[0], "*", None, "--json" in args)
    return True
