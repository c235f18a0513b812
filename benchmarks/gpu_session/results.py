"""What a step found, as JSON and as a Markdown table; a step writes its part after every figure."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED = "passed", "failed"
MOST_LINES = 12
"""Lines of an error that are kept."""


@dataclass(frozen=True)
class Figure:
    """One measured value, beside its ratio to what bounds it.

    of    what the ratio is of: "the pinned link", "the CPU"
    goal  the ratio to reach; None: there is none
    """

    what: str
    value: float | int | str
    unit: str = ""
    ratio: float | None = None
    of: str = ""
    goal: float | None = None


@dataclass(frozen=True)
class Check:
    """One thing that must be so. `detail` says what was expected and what was found."""

    what: str
    ok: bool
    detail: str = ""


@dataclass
class StepResult:
    """What a step found so far. A crash keeps it: every change is written to `file` at once."""

    file: Path | None = None
    figures: list[Figure] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def figure(
        self,
        what: str,
        value: float | int | str,
        unit: str = "",
        *,
        ratio: float | None = None,
        of: str = "",
        goal: float | None = None,
    ) -> None:
        """Add a measured value, and print it."""
        self.figures.append(Figure(what, value, unit, ratio, of, goal))
        print(f"{what}: {_cells(self.figures[-1])}", flush=True)
        self.write()

    def check(self, what: str, ok: bool, detail: str = "") -> None:
        """Add something that must be so: the step fails where it is not."""
        self.checks.append(Check(what, bool(ok), detail))
        print(f"{'ok' if ok else 'WRONG'}: {what} {detail}".rstrip(), flush=True)
        self.write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)
        self.write()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Turn an exception of the block into a failed check, so that the step goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(what, False, last_lines(f"{type(error).__name__}: {error}"))

    def write(self) -> None:
        """Replace the file as a whole: a process that is killed leaves the last state."""
        if self.file is not None:
            replace_text(self.file, json.dumps(self.found()))

    def found(self) -> dict[str, Any]:
        return {
            "figures": [asdict(one) for one in self.figures],
            "checks": [asdict(one) for one in self.checks],
            "notes": self.notes,
        }


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-MOST_LINES:])


def replace_text(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    os.replace(new, file)


def write_session(folder: Path, session: Mapping[str, Any]) -> None:
    """Write a session's JSON and table into the folder."""
    replace_text(folder / "gpu-session.json", json.dumps(session, indent=1) + "\n")
    replace_text(folder / "gpu-session.md", table(session))


# ------------------------------------------------------------------------------- Markdown


def table(session: Mapping[str, Any]) -> str:
    """Return a session as Markdown: the state of each step, then its figures and failed checks."""
    versions = ", ".join(f"{name} {version}" for name, version in session["versions"].items())
    lines = [
        f"# GPU session of {session['date']}",
        "",
        f"{session['device_name']}; size {session['size']}; {versions}.",
        "",
        "| step | result | s | checks | what it is |",
        "|---|---|---|---|---|",
    ]
    for step in session["steps"]:
        good = sum(one["ok"] for one in step["checks"])
        checks = f"{good} of {len(step['checks'])}" if step["checks"] else ""
        cells = (step["name"], step["status"], f"{step['seconds']:.0f}", checks, step["what"])
        lines.append(_row(cells))
    lines += _goals(session["steps"])
    for step in session["steps"]:
        lines += _details(step)
    return "\n".join(lines) + "\n"


def _goals(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of what has a goal, what misses it first: it is read before all else."""
    found = [(step["name"], Figure(**one)) for step in steps for one in step["figures"]]
    aims = [(name, one) for name, one in found if one.goal is not None and one.ratio is not None]
    if not aims:
        return []
    aims.sort(key=lambda pair: (pair[1].ratio or 0.0) / (pair[1].goal or 1.0))
    rows = [
        (name, *_figure_row(one), "yes" if (one.ratio or 0.0) >= (one.goal or 0.0) else "**no**")
        for name, one in aims
    ]
    head = ["", "## Goals", "", "| step | what | figure | ratio | goal | met |", "|---|---|---|---|---|---|"]  # fmt: skip
    return [*head, *map(_row, rows)]


def _details(step: Mapping[str, Any]) -> list[str]:
    wrong = [one for one in step["checks"] if not one["ok"]]
    if not (step["figures"] or wrong or step["notes"] or step["error"]):
        return []
    lines = ["", f"## {step['name']}: {step['status']}", ""]
    if step["figures"]:
        lines += ["| what | figure | ratio | goal |", "|---|---|---|---|"]
        lines += [_row(_figure_row(Figure(**one))) for one in step["figures"]] + [""]
    for one in wrong:
        lines += [f"- WRONG: {one['what']}", *_quoted(one["detail"])]
    lines += [f"- {note}" for note in step["notes"]]
    return lines + _quoted(step["error"])


def _quoted(text: str) -> list[str]:
    return ["", "```", *text.splitlines(), "```", ""] if text else []


def _figure_row(one: Figure) -> Sequence[str]:
    goal = "" if one.goal is None else f"{one.goal:g}"
    return one.what, _amount(one), _ratio(one), goal


def _amount(one: Figure) -> str:
    value = one.value if isinstance(one.value, int | str) else f"{one.value:.4g}"
    return f"{value} {one.unit}".strip()


def _ratio(one: Figure) -> str:
    return "" if one.ratio is None else f"{one.ratio:.3g} of {one.of}"


def _cells(one: Figure) -> str:
    return ", ".join(cell for cell in _figure_row(one)[1:] if cell)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
