"""Run steps one after another, each in a process of its own, and keep what each has found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.importable import ROOT, is_importable, python_path, versions
from benchmarks.gpu_session.results import FAILED, PASSED, StepResult, write_session

MEMORY_DISK = Path("/dev/shm")
ROOM = {"full": 44 << 30, "tiny": 1 << 30}
"""Free bytes of a folder in which the steps of a size may work."""
PATIENCE = {"full": 1, "tiny": 4}
"""By what the limits of the steps are multiplied: they are for a machine with a GPU that does nothing else."""
LAST_S = 3.0
"""Seconds before its limit at which a step prints where it hangs."""
DEATH_S = 10.0
"""Seconds that a killed process is waited for."""
LOG = "gpu-session.log"
"""The whole output of all steps that did not pass, in the session's folder."""
LOG_CHARACTERS = 6000
"""What the JSON and the table keep of it for each."""


@dataclass(frozen=True)
class Step:
    """One part of a session.

    call     "module:function", called with a `StepRun`
    limit_s  seconds after which its process is killed
    needs    modules without which it is skipped; ckptmap and torch need not be named
    cuda     True: it is skipped on any other device
    """

    name: str
    what: str
    call: str
    limit_s: float
    needs: Sequence[str] = ()
    cuda: bool = False


@dataclass(frozen=True)
class StepRun:
    """What a step is given: its device, whether it should be quick, a folder, and a place for results."""

    device: str
    size: str
    work: Path
    result: StepResult

    @property
    def is_tiny(self) -> bool:
        return self.size == "tiny"

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Options:
    """How a session is run.

    limit_s  seconds for all steps together
    work     the folder for checkpoints; None: chosen by its room
    began    when the session began, by the monotonic clock; None: with its first step
    """

    out: Path
    device: str = "cuda"
    size: str = "full"
    limit_s: float = 540.0
    work: Path | None = None
    began: float | None = None


def run_session(steps: Sequence[Step], options: Options, device_name: str) -> dict[str, Any]:
    """Run the steps in order and return the session; its files are written after each step."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / LOG).unlink(missing_ok=True)
    began = time.monotonic() if options.began is None else options.began
    ends = began + options.limit_s
    with tempfile.TemporaryDirectory(prefix="ckptmap-gpu-", dir=_work(options)) as folder:
        session: dict[str, Any] = {
            "schema": 1,
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "device": options.device,
            "device_name": device_name,
            "size": options.size,
            "work": folder,
            "versions": {"python": sys.version.split()[0], **versions()},
            "steps": [],
        }
        write_session(options.out, session)  # also where the session is killed in its first step
        for step in steps:
            print(f"== {step.name}: {step.what}", flush=True)
            done = _run(step, options, Path(folder), ends - time.monotonic())
            print(f"== {step.name}: {done['status']}, {done['seconds']:.1f} s", flush=True)
            session["steps"].append(done)
            write_session(options.out, session)
    return session


def _work(options: Options) -> Path:
    """Return the folder to work in: memory where there is room, so that no disk bounds a rate."""
    if options.work is not None:
        return options.work
    places = [place for place in (MEMORY_DISK,) if place.is_dir()]
    room = ROOM[options.size]
    return next(
        (place for place in places if shutil.disk_usage(place).free >= room),
        Path(tempfile.gettempdir()),
    )


def _run(step: Step, options: Options, folder: Path, left_s: float) -> dict[str, Any]:
    limit = min(step.limit_s * PATIENCE[options.size], left_s)
    missing = _missing(step, options.device)
    if missing:
        return _result(step, f"skipped: needs {missing}")
    if limit <= LAST_S:
        return _result(step, "not run: the time of the session was up")
    work, started = folder / step.name, time.monotonic()
    work.mkdir()
    log = work / "log"
    status = _run_process(step, options, work, log, limit)
    found = _read(work / "result.json")
    if status == PASSED and any(not check["ok"] for check in found["checks"]):
        status = FAILED
    text = log.read_text(errors="replace")
    if status != PASSED:
        with (options.out / LOG).open("a") as logs:
            logs.write(f"== {step.name}: {status}\n{text}\n")
    shutil.rmtree(work, ignore_errors=True)
    seconds, error = time.monotonic() - started, "" if status == PASSED else text[-LOG_CHARACTERS:]
    return _result(step, status, **found, seconds=seconds, error=error)


def _result(step: Step, status: str, **found: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {**StepResult().found(), "seconds": 0.0, "error": ""}
    known = {"name": step.name, "what": step.what, "status": status, "limit_s": step.limit_s}
    return {**known, **empty, **found}


def _missing(step: Step, device: str) -> str:
    lacks = [name for name in step.needs if not is_importable(name)]
    if step.cuda and not device.startswith("cuda"):
        lacks.insert(0, "CUDA")
    return ", ".join(lacks)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return StepResult().found()
    return found


def _run_process(step: Step, options: Options, work: Path, log: Path, limit_s: float) -> str:
    """Run a step; return "passed", "failed", "timed out after ..." or "crashed: ..."."""
    command = [
        sys.executable, "-m", "benchmarks.gpu_session", "--child", step.call, "--work", str(work),
        "--device", options.device, "--size", options.size, "--limit", str(limit_s),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": python_path(work.parent / "packages")}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # matrix products equal from run to run
    environment["PYTHONFAULTHANDLER"] = environment["PYTHONUNBUFFERED"] = "1"
    if options.size == "full":
        environment.pop("OMP_NUM_THREADS", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"timed out after {limit_s:.0f} s"
        finally:
            _kill(process)
    if code < 0:
        return f"crashed: {signal.Signals(-code).name}"
    return FAILED if code else PASSED


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started: they share one process group.

    One that waits in the driver of a device may stay, and must not hold up the steps after it.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(DEATH_S)
