"""Which checkpoint of a run is the newest: what was saved last, which is not always the highest step.

root/latest    `step-15`: a run went back to step 10, and went on from there
root/step-30   of the run before; it is tried after step-15, and removed in its turn

orbax and torchtitan take the highest step, and a run that went back would jump to its own past. Where there is no
pointer, as in their directories, the highest step is the newest here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmap.operations.step_directories import (
    SavedStep,
    StepDirectory,
    describe_step,
    find_steps,
)

LATEST = "latest"
"""Name of the file that names the newest checkpoint."""
_MAX_NBYTES = 256


def named_newest(root: Path) -> str:
    """Return the name in the pointer; "" where there is none, or it names no entry of the directory."""
    try:
        with (root / LATEST).open("rb") as file:
            name = file.read(_MAX_NBYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if name and Path(name).name == name and name != ".." else ""


def newest_first(root: Path) -> list[StepDirectory]:
    """Return the checkpoints in the order in which they are tried: the newest first. A run that went
    back to step 10 and saved step 15 has that one as its newest, though there is a step 30."""
    found = find_steps(root)
    near = around_newest(root, found)
    rank = {one.path: (one.number, one.step) for one in near}
    last = [one for one in found if one.path in rank]
    rest = [one for one in found if one.path not in rank]
    return [*sorted(last, key=lambda one: rank[one.path], reverse=True), *rest[::-1]]


def around_newest(
    root: Path,
    found: Sequence[StepDirectory],
    describe: Callable[[StepDirectory], SavedStep] = describe_step,
) -> list[SavedStep]:
    """Return the checkpoint that the pointer names, and those of later steps. One of them is the
    newest: a process may be killed before it moves the pointer. Others' saves have the number of
    the pointer's, so that their step decides."""
    name = named_newest(root)
    at = next((number for number, one in enumerate(found) if one.path.name == name), None)
    if at is None:
        return [describe(one) for one in found[-1:]]
    near = [describe(one) for one in found[at:]]
    number = near[0].number
    return [one if one.number else replace(one, number=number) for one in near]
