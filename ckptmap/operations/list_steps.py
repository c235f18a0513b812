"""The checkpoints of one run: directories below a root that are named by the step they were saved at.

step-100         torchtitan's name, and that of `ckptmap.CheckpointManager`
checkpoint-100   that of transformers' Trainer
checkpoint_100   that of accelerate, which counts saves and not steps
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckptmap.checkpoint import base_record
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.core.formatting import counted, human
from ckptmap.core.printable import as_lines
from ckptmap.errors import CkptmapError, SourceError
from ckptmap.formats.detect import look

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


@dataclass(frozen=True)
class StepList:
    """The result of `ckptmap ls`: the checkpoints of a run, by rising step."""

    root: Path
    steps: Sequence[SavedStep]

    def to_json(self) -> dict[str, object]:
        rows = [{**asdict(one), "path": str(one.path)} for one in self.steps]
        return {"root": str(self.root), "steps": rows}

    def __str__(self) -> str:
        rows = [("step", "setup", "ranks", "tensors", "size", "metrics")]
        for one in self.steps:
            if one.problem:
                rows.append((str(one.step), f"incomplete: {one.problem}", "", "", "", ""))
                continue
            metrics = ", ".join(f"{name} {value:g}" for name, value in one.metrics.items())
            size = (str(one.world_size), str(one.tensors), human(one.nbytes))
            rows.append((str(one.step), one.setup, *size, metrics))
        whole = [row for row in rows if not row[1].startswith("incomplete: ")]
        widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        last = max((one.step for one in self.steps if not one.problem), default=None)
        newest = "none can be opened" if last is None else f"the newest is of step {last}"
        return as_lines([*lines, f"{counted(len(self.steps), 'checkpoint')}; {newest}"])


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
        with open_checkpoint(found.path) as ckpt:
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


def list_steps(root: Path) -> StepList:
    """Return the checkpoints of a run. Raises SourceError CKM111 where there is none, CKM101 where nothing
    is at the path."""
    look(root)
    found = find_steps(root)
    if not found:
        raise SourceError(
            "CKM111",
            f"{root}: holds no checkpoints of steps, expected directories named step-100,"
            " checkpoint-100 or checkpoint_100",
            "give the directory that a run saves into; `ckptmap inspect` looks at one checkpoint",
        )
    return StepList(root, [describe_step(one) for one in found])
