"""The tests that have a variant for CUDA, run by the installed pytest with the settings of the project.

A test whose library is missing is skipped. A file that cannot be imported without a library is left
out and named.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_session.importable import ROOT, is_importable
from benchmarks.gpu_session.session import StepRun

ASKS_FOR_CUDA = re.compile(r": Device\b|cuda")
"""What a file holds in which a test takes the fixture `device` or asks for CUDA by itself."""
CHOSEN = "(cuda or gpu) and not fake and not benchmark"
"""The tests among them, by their names and parameters, as pytest's -k has it."""
ALWAYS = "tests/execution"
"""A folder whose files with such tests are run as a whole: what copies values to the device and back."""
MOST_TEXT = 1500
MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def run(step: StepRun) -> None:
    """Run the tests; add a failed check for each that fails."""
    found = files(step.is_tiny)
    whole = [file for file in found if file.parent == ROOT / ALWAYS]
    others = [file for file in found if file not in whole]
    for name, some, options in (("whole", whole, []), ("chosen", others, ["-k", CHOSEN])):
        if some:
            pytest(step, name, some, options)


def files(is_tiny: bool) -> list[Path]:
    """Return the files in which a test asks for CUDA."""
    where = ROOT / (ALWAYS if is_tiny else "tests")
    return [
        file for file in sorted(where.rglob("test_*.py")) if ASKS_FOR_CUDA.search(file.read_text())
    ]


def pytest(step: StepRun, name: str, some: Iterable[Path], options: list[str]) -> None:
    report = step.work / f"{name}.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}",
        f"--junitxml={report}", "--continue-on-collection-errors", *options, *map(str, some),
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, check=False)
    step.result.figure(f"{name}: pytest", time.perf_counter() - start, "s")
    if done.returncode not in (0, 1, 2):
        step.result.check(f"{name}: pytest ran", False, f"exit code {done.returncode}")
    if report.exists():
        counted(step, name, report)


def counted(step: StepRun, name: str, report: Path) -> None:
    passed, skipped = 0, 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        wrong = [*case.findall("failure"), *case.findall("error")]
        if wrong:
            failed(step, f"{case.get('classname')}::{case.get('name')}".strip(":"), wrong[0])
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    step.result.figure(f"{name}: tests passed", passed)
    step.result.figure(f"{name}: tests skipped", skipped)


def failed(step: StepRun, test: str, wrong: ElementTree.Element) -> None:
    """Add a failed check, or a note where a file needs a library that is not here."""
    text = f"{wrong.get('message') or ''}\n{wrong.text or ''}".strip()
    missing = MISSING.search(text)
    if "collection failure" in text and missing and not is_importable(missing[1].partition(".")[0]):
        step.result.note(f"{test}: not collected: needs {missing[1]}")
    else:
        step.result.check(test, False, text[-MOST_TEXT:])
