"""The checkpoints of one run: directories below a root that are named by the step they were saved at.

step-100         torchtitan's name, and that of `ckptmap.CheckpointManager`
checkpoint-100   that of transformers' Trainer
checkpoint_100   that of accelerate, which counts saves and not steps
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptmap.checkpoint import base_record
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.checkpoint.open import open_run_of_adapter
from ckptmap.errors import CkptmapError
from ckptmap.formats.detect import look
from ckptmap.storage.files import Files

_NAME = re.compile(r"(?:step-|checkpoint[-_])(\d{1,18})")
LAST_STEP = 10**18 - 1
"""The last step that a name tells."""
MANAGER = "manager"
"""Key of what a manager saves among the extra values: `{"metrics": {name: value}}`."""


@dataclass(frozen=True)
class StepDirectory:
    """A directory that is named by a step. Whether it holds a checkpoint is not known."""

    step: int
    path: Path


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint of a run.

    world_size    ranks that wrote it; 1 where it does not tell
    nbytes        of its tensors
    metrics       what the run measured when it was saved by a manager
    is_managed    whether a manager saved it
    number        of the save: it rises in the order of a manager's saves; 0: not recorded
    problem       why it cannot be opened; "": it can
    bases         places of the checkpoints that have the weights which it lacks
    """

    step: int
    path: Path
    setup: str = ""
    world_size: int = 1
    tensors: int = 0
    nbytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_managed: bool = False
    number: int = 0
    problem: str = ""
    bases: Sequence[str] = ()


def find_steps(root: Path) -> list[StepDirectory]:
    """Return the directories below `root` that are named by a step, by rising step."""
    if not root.is_dir():
        return []
    found = [
        StepDirectory(int(match[1]), entry)
        for entry in root.iterdir()
        if (match := _NAME.fullmatch(entry.name)) and entry.is_dir()
    ]
    return sorted(found, key=lambda one: (one.step, one.path.name))


def describe_step(found: StepDirectory) -> SavedStep:
    """Return what the headers of a checkpoint tell; a problem where it cannot be opened."""
    try:
        files = Files()
        of_adapter = open_run_of_adapter(files, look(found.path, files.mounts))
        with open_checkpoint(found.path) if of_adapter is None else of_adapter as ckpt:
            return _described(found, ckpt)
    except CkptmapError as error:
        return SavedStep(found.step, found.path, problem=error.message)


def _described(found: StepDirectory, ckpt: Checkpoint) -> SavedStep:
    manager = ckpt.extra.get(MANAGER)
    is_managed = isinstance(manager, Mapping) and ckpt.extra.get("step") == found.step
    values = manager.get("metrics") if isinstance(manager, Mapping) else None
    metrics = {
        str(name): float(value)
        for name, value in (values.items() if isinstance(values, Mapping) else ())
        if isinstance(value, int | float)
    }
    number = manager.get("number") if isinstance(manager, Mapping) else 0
    nbytes = sum(info.nbytes for info in ckpt.infos().values())
    return SavedStep(
        found.step, found.path, ckpt.setup, ckpt.world_size or 1, len(ckpt), nbytes, metrics,
        is_managed, number if isinstance(number, int) and number > 0 else 0,
        bases=[
            place
            for base in base_record.recorded(ckpt).values()
            for place in base.places(ckpt.path)
        ],
    )  # fmt: skip
