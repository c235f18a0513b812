"""Processes that may be killed at any point, without 0.5 to 3 seconds of a processor for imports each.

A server of `tests.corpus.ranks` forks them, which has imported ckptmap's modules, torch and other libraries.
So these are for tests of what a process leaves behind, not of what it imports or how the interpreter ends.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.corpus import ranks

POLL_S = 0.002
CODE = "tests.corpus.forked_code"
_numbers = itertools.count()


class Process:
    """A process that was forked, as far as tests need `subprocess.Popen`."""

    def __init__(self, started: ranks.Started) -> None:
        self._started = started

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._started.process.poll()

    def send_signal(self, what: signal.Signals) -> None:
        """Send a signal, where it still runs."""
        if self.poll() is None:
            os.kill(self._started.process.pid, what)

    def wait(self, timeout: float = 120.0) -> int:
        """Return the exit code once it has ended."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"not done after {timeout:g} s"
            time.sleep(POLL_S)
        return code

    def done(self) -> ranks.RankOutput:
        """Return its exit code and output once it has ended."""
        self.wait()
        return self._started.output()


@contextmanager
def forked(
    module: str, *args: object, cwd: Path = ranks.ROOT, env: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """Run `python -m MODULE ARGS` beside the block; it is killed where it still runs at the end."""
    with tempfile.TemporaryDirectory(prefix="ckptmap-forked-") as folder:
        place = Path(folder) / str(next(_numbers))
        variables = ranks.environment() | dict(env or {})
        started = ranks.start(0, module, list(map(str, args)), place, variables, cwd)
        try:
            yield Process(started)
        finally:
            ranks.kill([started])


def run_forked(
    module: str,
    *args: object,
    check: bool = False,
    cwd: Path = ranks.ROOT,
    env: Mapping[str, str] | None = None,
) -> ranks.RankOutput:
    """Run `python -m MODULE ARGS` to its end, with these variables beside those of this process."""
    with forked(module, *args, cwd=cwd, env=env) as process:
        done = process.done()
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, module, done.stdout, done.stderr)
    return done


def run_code(code: str, *args: object) -> int:
    """Return the exit code of `python -c CODE ARGS`."""
    return run_forked(CODE, code, *args).returncode
