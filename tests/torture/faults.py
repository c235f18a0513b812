"""Faults: the n-th file-system call of a run fails, does half of its work, or is the run's last.

recovered   the run failed or was killed; the destination was old or absent, or complete; the
            same command then succeeded, and left nothing behind
unaffected  the run succeeded all the same
mixed, lost, stuck, left, unwarned, internal   what else there was
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.torture.operations import NEW, OLD, Operation
from tests.torture.runner import Outcome, forked, refusal
from tests.torture.system_calls import Calls, Fault


class Faults:
    name = "faults"
    good = frozenset({"recovered", "unaffected"})

    def __init__(self, operations: Sequence[Operation], folder: Path) -> None:
        self.operations = operations
        self.calls: dict[str, int] = {}
        for op in operations:
            whole = forked(lambda: counted(op, folder / op.name))  # noqa: B023
            if whole.result != "ok":
                raise AssertionError(f"{op.name}: {whole}")
            self.calls[op.name] = int(whole.text)

    def case(self, draw: random.Random, folder: Path) -> Iterator[Outcome]:
        op = draw.choice(self.operations)
        fault = Fault.drawn(draw, self.calls[op.name])
        yield Outcome("begun", op.name, str(fault))
        place = folder / "place"
        op.prepare(place)
        first = forked(lambda: attempt(op, place, fault))
        label = f"{fault}: {first.label}" if first.label else str(fault)
        if fault.kills and first.result == "hang":
            first = Outcome("killed", op.name, "")
        result, text = judged(op, place, first)
        op.finish(place)
        yield Outcome(result, op.name, label, text)


def attempt(op: Operation, place: Path, fault: Fault | None) -> Iterator[Outcome]:
    """Run an operation in this process, whose calls are watched."""
    calls = Calls(place, fault)
    result, text = "ok", ""
    with pytest.MonkeyPatch.context() as patch:
        calls.install(patch)
        try:
            op.run(place)
        except Exception as error:
            result, text = refusal(error)
    yield Outcome(result, op.name, calls.failing, text or str(calls.count))


def counted(op: Operation, place: Path) -> Iterator[Outcome]:
    """Run an operation that nothing disturbs; the outcome's text is how many calls it makes."""
    op.prepare(place)
    whole = forked(lambda: attempt(op, place, None))
    if whole.result != "ok" or op.state(place) != NEW or op.left(place):
        raise AssertionError(f"{op.name}: {whole}, {op.state(place)}, {op.left(place)}")
    yield whole


def judged(op: Operation, place: Path, first: Outcome) -> tuple[str, str]:
    """Return the result of a case, of which the first run ended as `first` says."""
    if first.result not in ("ok", "refused", "killed"):
        return first.result, first.text
    state = op.state(place)
    if state not in op.allowed:
        lost = op.before == OLD and not os.path.lexists(place / op.dst)
        return ("lost" if lost and first.result != "killed" else "mixed"), f"{state}; {first.text}"
    if first.result == "ok" and state != NEW:
        return "unwarned", f"the run said nothing, the destination is {state}"
    if first.result != "ok" or op.left(place):  # the next run sweeps what this one could not
        again = forked(lambda: attempt(op, place, None))
        if again.result != "ok" and not (again.result == "refused" and state == NEW):
            return "stuck", f"{again.text}; after {first.text}"
        if op.state(place) != NEW:
            return "mixed", f"after the second run: {op.state(place)}"
    if op.left(place):
        return "left", f"{op.left(place)}; {first.result} {first.text}"
    return ("unaffected" if first.result == "ok" else "recovered"), first.text
