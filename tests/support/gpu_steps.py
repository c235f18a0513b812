"""Steps of a GPU session that go wrong, each in its way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu_session.session import StepRun


def good(step: StepRun) -> None:
    step.result.figure("a rate", 3.0, "GB/s", ratio=0.5, of="the link", goal=0.8)
    step.result.check("one is one", True)


def wrong(step: StepRun) -> None:
    step.result.check("bytes", False, "expected 1, got 2")
    with step.result.attempt("the second half"):
        raise ValueError("no such kernel")
    step.result.check("goes on", True)


def raises(step: StepRun) -> None:
    step.result.figure("before", 1)
    raise RuntimeError("the device is gone")


def hangs(step: StepRun) -> None:
    step.result.figure("before", 1)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    (step.work.parents[1] / "child").write_text(str(subprocess.Popen(sleeper).pid))
    time.sleep(600)


def kills_itself(step: StepRun) -> None:
    step.result.figure("before", 1)
    os.kill(os.getpid(), signal.SIGKILL)
