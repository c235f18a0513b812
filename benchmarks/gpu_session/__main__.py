"""The command line of a session, and of the process of one step."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import signal
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu_session.importable import ROOT
from benchmarks.gpu_session.results import PASSED, StepResult
from benchmarks.gpu_session.session import LAST_S, Options, StepRun, run_session
from benchmarks.gpu_session.steps import STEPS

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that this process gets when its parent ends."""


def main(arguments: list[str] | None = None) -> int:
    began = time.monotonic()  # `import torch` may take half a minute on a cold machine
    asked = _arguments(arguments)
    if asked.child:
        return _step(asked)
    device_name = _device_name(asked.device)
    if not device_name:
        print("CUDA: not run")
        return 0
    names = asked.steps.split(",") if asked.steps else [step.name for step in STEPS]
    unknown = set(names) - {step.name for step in STEPS}
    if unknown:
        known = ", ".join(step.name for step in STEPS)
        print(f"--steps: no step {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the step, too
    options = Options(asked.out, asked.device, asked.size, asked.limit, asked.work, began)
    steps = [step for step in STEPS if step.name in names]
    session = run_session(steps, options, device_name)
    print((asked.out / "gpu-session.md").read_text())
    states = [step["status"] for step in session["steps"]]
    return int(any(not state.startswith((PASSED, "skipped")) for state in states))


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session",
        description="Is ckptmap right on this GPU, and how fast is it?",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--steps", default="", help="names with commas between them; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--limit", type=float, default=520.0, help="seconds for all steps together")
    parser.add_argument("--work", type=Path, help="a folder for checkpoints; default: in memory")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _device_name(device: str) -> str:
    """Return the device's name; empty: there is no such device."""
    if not device.startswith("cuda"):
        return device
    try:
        import torch
    except ImportError:
        return ""
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


def _step(asked: argparse.Namespace) -> int:
    """Run one step in this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.dump_traceback_later(max(0.1, asked.limit - LAST_S))  # says where it hangs
    result = StepResult(asked.work / "result.json")
    module, _, function = asked.child.partition(":")
    try:
        step = getattr(importlib.import_module(module), function)
        step(StepRun(asked.device, asked.size, asked.work, result))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
