"""Run `python -m MODULE` under N gloo ranks on this machine, and leave nothing behind.

Ranks are forked from servers that have imported torch already (`tests.corpus.rank_server`), two of
them in turn: as of separate processes, the string hashes of two ranks differ, and so does the order
of their sets. A rank whose environment says what a library reads when it is imported starts afresh.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 3.0
"""How long the others may go on once a rank has failed: their own message is worth the wait."""
POLL_S = 0.02
SERVERS = 2
_alone = itertools.count()
allowed = True
"""Whether several ranks may be started; in a test that has no mark `ranks` they may not."""
processor_s = 0.0
"""What forked ranks have taken of a processor; their server ends, and counts, with this process."""
ITSELF = -1
"""The number by which a server answers for itself, not for a rank."""
NATIVE_CRASH = (-signal.SIGABRT, -signal.SIGSEGV)


@dataclass(frozen=True)
class RankOutput:
    """What one rank left: exit code (negative: killed by that signal) and its whole output."""

    rank: int
    returncode: int
    stdout: str
    stderr: str


class RanksError(AssertionError):
    """A rank failed or the time was up; the message holds every failed rank's stderr."""


class _Process(Protocol):
    """What `subprocess.Popen` is to this module."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


@dataclass(frozen=True)
class Started:
    """A process that was started, and the folder of its files `stdout` and `stderr`."""

    process: _Process
    folder: Path

    def output(self, rank: int = 0) -> RankOutput:
        """Return what it left, once it has ended."""
        stdout, stderr = (
            (self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")
        )
        return RankOutput(rank, self.process.wait(), stdout, stderr)


def run_ranks(
    module: str,
    world_size: int,
    args: Sequence[str] = (),
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[RankOutput]:
    """Run the module on ranks 0..world_size-1, torchrun's environment set; outputs by rank.

    `dist.init_process_group("gloo")` in the module joins them. The rendezvous store lives in this
    process on a port the kernel chose, so no two runs can collide, and ranks cannot outlive it.
    Raises RanksError where a rank exits with another code than 0, or after `timeout` seconds.

    torch's gloo may free memory twice in a rank ("free(): double free", seen once, in `full_tensor`
    of torch 2.13 on a busy machine). No code of ours is native: then, and only then, all ranks are
    run once more, with a warning that shows in pytest's summary.
    """
    assert allowed or world_size == 1, f"{module}: a test that starts ranks needs the mark `ranks`"
    outputs, late = _run(module, world_size, args, timeout, env)
    if not late and any(output.returncode in NATIVE_CRASH for output in outputs):
        warnings.warn(f"{module}: a rank crashed, run again\n{_failures(outputs)}", stacklevel=2)
        outputs, late = _run(module, world_size, args, timeout, env)
    if late or any(output.returncode for output in outputs):
        reason = f"not done after {timeout:g} s" if late else "failed"
        raise RanksError(f"{module} on {world_size} ranks: {reason}\n{_failures(outputs)}")
    return outputs


def run_alone(
    module: str,
    args: Sequence[str] = (),
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> RankOutput:
    """Run the module in one process that knows of no ranks; each call takes the other server.

    Raises RanksError where it exits with another code than 0, or after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ckptmap-alone-") as temporary:
        number = next(_alone) % SERVERS
        variables = environment() | dict(env or {})
        process = start(number, module, args, Path(temporary) / "alone", variables)
        try:
            late = not _wait([process], time.monotonic() + timeout)
        finally:
            kill([process])
        output = process.output(0)
    if late or output.returncode:
        reason = f"not done after {timeout:g} s" if late else "failed"
        raise RanksError(f"{module}: {reason}\n{_failures([output])}")
    return output


def _run(
    module: str,
    world_size: int,
    args: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None,
) -> tuple[list[RankOutput], bool]:
    """Outputs by rank, and whether the time was up."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ckptmap-ranks-") as temporary:
        ranks: list[Started] = []
        try:
            make_ready(world_size)
            for rank in range(world_size):
                variables = rank_environment(rank, world_size, store.port) | dict(env or {})
                folder = Path(temporary) / str(rank)
                ranks.append(start(rank, module, args, folder, variables))
            late = not _wait(ranks, time.monotonic() + timeout)
        finally:
            kill(ranks)
        outputs = [rank.output(i) for i, rank in enumerate(ranks)]
    del store
    return outputs, late


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank as torchrun sets it; the store of the group is at this port."""
    return environment() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Rank 0 joins the store of the parent in place of opening one of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def environment() -> dict[str, str]:
    """Return the environment of what is started here."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Ranks with uneven shards must not share compiled graphs.
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


def make_ready(processes: int) -> None:
    """Wait for the servers that will start so many processes: they import at the same time."""
    servers = [_server(number) for number in range(min(processes, SERVERS))]
    for server in servers:
        server.wait()


def start(
    number: int,
    module: str,
    args: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    cwd: Path = ROOT,
) -> Started:
    """Start the module in a process forked by the server of that number; `folder` is made for its output."""
    folder.mkdir()
    server = _server(number % SERVERS)
    if all(env.get(name) == server.env.get(name) for name in _read_by_imports(env, server.env)):
        return Started(server.fork(module, args, folder, env, cwd), folder)
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.corpus.rank_main", module, *args],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # its own group: what a rank started ends with it
        )
    return Started(process, folder)


def _read_by_imports(*environments: Mapping[str, str]) -> set[str]:
    """Return the variables that a library may read while it is imported, and never again."""
    prefixes = ("HF_", "HUGGINGFACE_", "LD_", "OMP_", "TORCH", "TRANSFORMERS_")
    names = {name for env in environments for name in env if name.startswith(prefixes)}
    # inductor sets the folder of its cache itself, when it is first used: in this process, too.
    return names - {"TORCHELASTIC_USE_AGENT_STORE", "TORCHINDUCTOR_CACHE_DIR"}


class _Server:
    """A process of `tests.corpus.rank_server`, for as long as this process lives."""

    def __init__(self) -> None:
        self.env = environment()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.corpus.rank_server"],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries say what they miss when they are imported
            start_new_session=True,
        )
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._unread = b""
        self._numbers = itertools.count()
        atexit.register(self.close)

    def close(self) -> None:
        """End the server, and ranks that still run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def wait(self) -> None:
        """Wait until it has imported all that it shares with ranks."""
        while ITSELF not in self._pids:
            self.read(timeout=None)

    def fork(
        self, module: str, args: Sequence[str], folder: Path, env: Mapping[str, str], cwd: Path
    ) -> _Forked:
        """Start a rank; its process."""
        number = next(self._numbers)
        request = {
            "id": number,
            "module": module,
            "args": list(args),
            "env": dict(env),
            "cwd": str(cwd),
            "stdout": str(folder / "stdout"),
            "stderr": str(folder / "stderr"),
        }
        for name in ("stdout", "stderr"):
            (folder / name).touch()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while number not in self._pids:
            self.read(timeout=None)
        return _Forked(self, number, self._pids[number])

    def code(self, number: int) -> int | None:
        """Return the exit code of a rank that has ended."""
        if number not in self._codes:
            self.read(timeout=0)
        return self._codes.get(number)

    def read(self, timeout: float | None) -> None:
        """Take in the answers that are there, or wait for some."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout)[0]:
            return
        data = os.read(stdout.fileno(), 1 << 16)
        if not data:
            raise RanksError(f"the server of ranks has ended with {self._process.wait()}")
        global processor_s
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            word, number, value, *taken_s = json.loads(line)
            (self._pids if word == "started" else self._codes)[number] = value
            processor_s += sum(taken_s)


@dataclass(frozen=True)
class _Forked:
    """A rank that a server has forked."""

    server: _Server
    number: int
    pid: int

    def poll(self) -> int | None:
        return self.server.code(self.number)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            self.server.read(timeout=None)
        return code


@cache
def _server(number: int) -> _Server:
    """Start a server when it is first asked for."""
    return _Server()


def _wait(ranks: Sequence[Started], deadline: float) -> bool:
    """True once all have ended, or one has failed and the grace is over; False: out of time."""
    failed_at: float | None = None
    while True:
        codes = [rank.process.poll() for rank in ranks]
        now = time.monotonic()
        if None not in codes:
            return True
        if failed_at is None and any(code for code in codes):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE_S:
            return True
        if now > deadline:
            return False
        time.sleep(POLL_S)


def kill(ranks: Sequence[Started]) -> None:
    """End what still runs, by the group that each rank leads; nothing else is touched."""
    for rank in ranks:
        if rank.process.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def _failures(outputs: Sequence[RankOutput], limit: int = 6000) -> str:
    return "\n".join(
        f"[rank {o.rank}] exit code {o.returncode}\n{o.stdout[-limit // 4 :]}{o.stderr[-limit:]}"
        for o in outputs
        if o.returncode
    )
