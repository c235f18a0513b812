"""A session of `benchmarks.gpu_session` whose steps are forked from it once it has imported torch.

python -m tests.support.forked_session OPTIONS     as `python -m benchmarks.gpu_session OPTIONS`

Each step would take 3 s of a processor to import what nearly all of them import first. All else is as in a process of
its own: its session, environment, output and exit code.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from benchmarks.gpu_session import __main__ as command_line
from benchmarks.gpu_session import session

PRELOADED = ("numpy", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp")
POLL_S = 0.02


class Forked:
    """A fork of this process that runs a step: what a session needs of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: int, cwd: Path,
        env: Mapping[str, str], start_new_session: bool,
    ) -> None:  # fmt: skip
        assert list(command[:3]) == [sys.executable, "-m", "benchmarks.gpu_session"]
        assert stdin == subprocess.DEVNULL and stderr == subprocess.STDOUT and start_new_session
        self._code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _become(command[3:], stdout.fileno(), cwd, env)

    def wait(self, timeout: float) -> int:
        """Return the exit code, negative for a signal. Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("step", timeout)
            else:
                time.sleep(POLL_S)
        return self._code


def _become(arguments: Sequence[str], output: int, cwd: Path, env: Mapping[str, str]) -> None:
    """Run a step in this fork, and end it."""
    code = 1
    try:
        os.setsid()
        for fd in (1, 2):
            os.dup2(output, fd)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.path[1:1] = env["PYTHONPATH"].split(os.pathsep)
        code = command_line.main(list(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    for name in PRELOADED:
        importlib.import_module(name)
    stand_in: Any = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    session.subprocess = stand_in  # type: ignore[misc]
    return command_line.main()


if __name__ == "__main__":
    raise SystemExit(main())
