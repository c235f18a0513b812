"""The tests that have a variant for CUDA, run by the installed pytest with the settings of the project.

A test whose library is missing is skipped. A file that cannot be imported without a library is left
out and named. What failed is written as it fails, so that a time limit keeps it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.importable import ROOT, is_importable
from benchmarks.gpu_session.results import Figure, StepResult
from benchmarks.gpu_session.session import StepRun

ASKS_FOR_CUDA = re.compile(r": Device\b|cuda")
"""What a file holds in which a test takes the fixture `device` or asks for CUDA by itself."""
CHOSEN = re.compile(r"cuda|gpu")
"""What the name of a test among them holds, with its parameters, if it needs a GPU for all that it asks."""
FAKE = re.compile(r"fake-cuda|benchmark")
ALWAYS = "execution"
"""A folder of tests whose files with such tests are run as a whole: how values come to a device and back."""
MOST_TEXT = 1500
MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def run(step: StepRun) -> None:
    """Run the tests; add a failed check for each that fails."""
    import pytest

    recorder = Recorder(step.result)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={ROOT}",
        "--continue-on-collection-errors",
    ]
    start = time.perf_counter()
    code = pytest.main([*options, *map(str, files(step.is_tiny))], plugins=[recorder])
    step.result.figure("pytest", time.perf_counter() - start, "s")
    done = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED}
    step.result.check("pytest ran", code in done, f"exit code {code}")


def files(is_tiny: bool) -> list[Path]:
    """Return the files in which a test asks for CUDA; of those that are always run the last, where it should be quick."""
    where = ROOT / "tests" / (ALWAYS if is_tiny else "")
    found = sorted(where.rglob("test_*.py"))
    asking = [file for file in found if ASKS_FOR_CUDA.search(file.read_text())]
    return asking[-1:] if is_tiny else asking


class Recorder:
    """A plugin of pytest that chooses the tests and takes their outcomes."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if is_chosen(item.path, item.name)]

    def pytest_collectreport(self, report: Any) -> None:
        if not report.failed:
            return
        text = str(report.longrepr)
        missing = MISSING.search(text)
        if missing and not is_importable(missing[1].partition(".")[0]):
            self.result.note(f"{report.nodeid}: not collected: needs {missing[1]}")
        else:
            self.result.check(f"{report.nodeid}: collected", False, text[-MOST_TEXT:])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            counts = [Figure(f"tests {outcome}", count) for outcome, count in self.counts.items()]
            self.result.figures[:] = counts
            self.result.write()  # a time limit keeps them
        if report.failed:
            text = f"{report.longreprtext[-MOST_TEXT:]}"
            self.result.check(f"{report.nodeid} ({report.when})", False, text)


def is_chosen(file: Path, name: str) -> bool:
    return ALWAYS in file.parts or bool(CHOSEN.search(name) and not FAKE.search(name))
