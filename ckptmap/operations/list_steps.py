"""`ckptmap ls`: the checkpoints of one run as a table, and which of them is the newest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptmap.core.formatting import counted, human
from ckptmap.core.printable import as_lines
from ckptmap.errors import SourceError
from ckptmap.formats.detect import look
from ckptmap.operations.newest_step import newest_first
from ckptmap.operations.step_directories import SavedStep, describe_step, find_steps


@dataclass(frozen=True)
class StepList:
    """The result of `ckptmap ls`: the checkpoints of a run, by rising step."""

    root: Path
    steps: Sequence[SavedStep]
    newest: Path | None = None
    """The checkpoint that was saved last; None: none can be opened."""

    def to_json(self) -> dict[str, object]:
        rows = [{**asdict(one), "path": str(one.path)} for one in self.steps]
        newest = None if self.newest is None else self.newest.name
        return {"root": str(self.root), "newest": newest, "steps": rows}

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
        last = next((one.step for one in self.steps if one.path == self.newest), None)
        newest = "none can be opened" if last is None else f"the newest is of step {last}"
        return as_lines([*lines, f"{counted(len(self.steps), 'checkpoint')}; {newest}"])


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
    steps = [describe_step(one) for one in found]
    opened = {one.path for one in steps if not one.problem}
    newest = next((one.path for one in newest_first(root) if one.path in opened), None)
    return StepList(root, steps, newest)
