"""The directory of a manager: the pointer to the newest checkpoint, and the removal of old ones.

root/latest                       the name of the newest, as text: `step-200`
root/.step-100.ckptmap-removed/   a checkpoint that is being removed; the next removal ends a killed one
root/step-100.damaged/            one that could not be opened, and whose step was saved again
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ckptmap.core.formatting import some
from ckptmap.errors import SourceError
from ckptmap.operations.newest_step import LATEST
from ckptmap.operations.step_directories import find_steps
from ckptmap.sharding.reference_model import MANIFEST

_REMOVED = ".ckptmap-removed"
_NEW = f".{LATEST}.ckptmap-new"
_OURS = re.compile(rf"\.metadata|__\d+_\d+\.distcp|{re.escape(MANIFEST)}")
"""Matches the names of the files of a save."""
_STALE_S = 60.0
"""Seconds after which a pointer that was not put in place is a killed process's."""


def refuse_no_root(root: Path) -> None:
    """Raise SourceError CKM101 for a root without checkpoints that is something else: a run would begin anew."""
    what, hint = "", f"give the directory of the run: CheckpointManager({str(root.parent)!r})"
    if root.is_file():
        what = "a file"
    elif (root / MANIFEST).is_file() or (root / ".metadata").is_file():
        what = "a checkpoint itself"
    if what:
        raise SourceError("CKM101", f"{root}: is {what}, expected a directory of checkpoints", hint)


def of_best(keep_best: tuple[str, str] | None) -> str:
    """Return what `restore(step="best")` looks for."""
    if keep_best is None:
        return "a checkpoint with the metric of keep_best, which this manager was not given"
    return f"a checkpoint that has the metric {keep_best[0]!r} of keep_best"


def no_such_step(root: Path, missing: str, steps: Sequence[int]) -> SourceError:
    """Return the error for a checkpoint that was asked for by its number or as the best.

    steps  those of the checkpoints that can be opened
    """
    if steps:
        hint = f"restore one of these, as step={steps[-1]}, or step='latest'"
    elif any(find_steps(root)):
        hint = f"step='latest' raises what is wrong with the newest of the checkpoints in {root}"
    else:
        hint = "nothing was saved there yet: check the path; step='latest' returns None, and a run begins anew"
    found = some(steps) if steps else "none"
    return SourceError("CKM101", f"{root}: expected {missing}, found steps {found}", hint)


def point_to(root: Path, name: str) -> None:
    """Let the pointer name a checkpoint, in one step. Raises OSError."""
    made = root / f"{_NEW}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        made.unlink()
    with made.open("x") as file:
        file.write(name + "\n")
    now = made.lstat().st_mtime  # by the clock of the disk, which may be another machine's
    for old in root.glob(f"{_NEW}-*"):
        with contextlib.suppress(OSError):
            if abs(now - old.lstat().st_mtime) > _STALE_S:
                old.unlink()
    os.replace(made, root / LATEST)


def remove(path: Path) -> None:
    """Remove a checkpoint, if another process has not. It is renamed first: half of one must not be
    taken for one. Raises OSError."""
    gone = path.with_name(f".{path.name}{_REMOVED}")
    _unlink_all(gone)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
    _unlink_all(gone)


def move_aside(path: Path) -> Path | None:
    """Rename a checkpoint of ours that cannot be opened, so that its step can be saved again, and return
    its new path; None where it may be somebody else's. Raises OSError."""
    entries = [entry.name for entry in path.iterdir()]
    if path.is_symlink() or MANIFEST not in entries or not all(map(_OURS.fullmatch, entries)):
        return None
    numbers = ("", *(f"-{number}" for number in range(2, 1000)))
    free = (path.with_name(f"{path.name}.damaged{number}") for number in numbers)
    aside = next(place for place in free if not os.path.lexists(place))
    os.rename(path, aside)
    return aside


def sweep(root: Path) -> None:
    """Remove what a killed process was removing. Raises OSError."""
    for gone in root.glob(f".*{_REMOVED}"):
        if gone.is_dir() and not gone.is_symlink():
            _unlink_all(gone)


def _unlink_all(gone: Path) -> None:
    """Remove a directory; another process may remove it at the same time."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(gone)
