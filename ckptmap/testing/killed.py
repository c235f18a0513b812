"""Run a function in a child process that SIGKILL ends in the middle of its work."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable

from ckptmap.testing.base import expect

PATIENCE_S = 60.0


def killed(run: Callable[[Callable[[], None]], None]) -> None:
    """Call `run(fault)` in a child process; calling `fault()` there kills the child at once.

    Raises AssertionError where the child ends by itself, fails otherwise, or hangs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of torch
        child = os.fork()
    if child == 0:
        try:
            run(lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)
    status = _waited(child)
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    expect(died, "a run that was to be killed while sealing ended by itself")


def _waited(child: int) -> int:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"a run that was to be killed while sealing hung for {PATIENCE_S:.0f} s")
