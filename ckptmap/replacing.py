"""What --overwrite may replace: a checkpoint that lies exactly there, and nothing beside it.

`open` looks into a directory for the one checkpoint inside; a home directory with a single model
in it opens well, and must not be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptmap import registry
from ckptmap.checkpoint import Checkpoint, open
from ckptmap.errors import CkptmapError, DestinationError, SourceError
from ckptmap.places import look
from ckptmap.verification import read_manifest

HINT = "--overwrite replaces checkpoints only; remove it yourself, or choose another"


def manifest_at(target: Path) -> dict[str, Any] | None:
    """The manifest of what is at the destination: a run killed just after it published left it."""
    if target.is_symlink() or not (target.is_file() or target.is_dir()):
        return None
    try:
        with open(target) as ckpt:
            return read_manifest(ckpt) if _lies_at(ckpt, target) else None
    except (CkptmapError, OSError):
        return None


def refuse_stranger(target: Path) -> None:
    """--overwrite replaces a checkpoint, never what holds something else. Raises DestinationError
    CKM301."""
    if not target.is_file() and not (target.is_dir() and any(target.iterdir())):
        return
    kind = "directory" if target.is_dir() else "file"
    try:
        with open(target) as ckpt:
            if not _lies_at(ckpt, target):
                raise _refusal(f"{target}: is a directory with a checkpoint inside: {ckpt.path}")
            inside = _others(target, ckpt.index.files) if kind == "directory" else []
    except SourceError as error:
        raise _refusal(
            f"{target}: is a {kind} that holds no checkpoint ({error.message})"
        ) from error
    if inside:
        raise _refusal(f"{target}: holds other checkpoints beside its own: {', '.join(inside)}")


def _refusal(message: str) -> DestinationError:
    return DestinationError("CKM301", message, HINT)


def _lies_at(ckpt: Checkpoint, target: Path) -> bool:
    return Path(ckpt.path).absolute() == target.absolute()


def _others(target: Path, files: Sequence[str]) -> list[str]:
    """Directories below that are checkpoints, and hold no part of this one: checkpoint-500/."""
    root = target.absolute()
    own = (Path(file) for file in files)
    mine = {file.relative_to(root).parts[0] for file in own if file.is_relative_to(root)}
    found = []
    for entry in sorted(target.iterdir()):
        try:
            if entry.name not in mine and entry.is_dir() and registry.knows(look(entry)):
                found.append(entry.name)
        except SourceError:
            continue
    return found
