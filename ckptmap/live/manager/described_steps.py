"""What is known of the checkpoints of a run that were opened before, so that a save need not open the newest again.

A checkpoint is known while its directory, its metadata and its manifest are the files that they were. What would be
written over, or removed, is opened anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ckptmap.operations.step_directories import SavedStep, StepDirectory, describe_step
from ckptmap.storage.own_files import MANIFEST

_FILES = (".", ".metadata", MANIFEST)
_State = tuple[tuple[int, int, int], ...]


@dataclass
class DescribedSteps:
    """The checkpoints that were described last."""

    _known: dict[Path, tuple[_State, SavedStep]] = field(default_factory=dict)

    def anew(self, found: list[StepDirectory]) -> list[SavedStep]:
        """Return what the headers of all checkpoints tell now, and know these from now on."""
        states = [
            _state(one.path) for one in found
        ]  # before they are read: what changes meanwhile is not known
        described = [describe_step(one) for one in found]
        self._known = {
            one.path: (state, one)
            for one, state in zip(described, states, strict=True)
            if state and not one.problem
        }
        return described

    def of(self, found: StepDirectory) -> SavedStep:
        """Return what is known of a checkpoint, or what its headers tell."""
        state, described = self._known.get(found.path, ((), None))
        if described is None or state != _state(found.path):
            return describe_step(found)
        return described


def _state(path: Path) -> _State:
    """Return what changes where a checkpoint is written anew; (): it lacks a file."""
    try:
        stats = [os.stat(path / name) for name in _FILES]
    except OSError:
        return ()
    return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in stats)
