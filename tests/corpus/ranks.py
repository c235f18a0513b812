"""Run `python -m MODULE` under N gloo ranks on this machine, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 3.0
"""How long the others may go on once a rank has failed: their own message is worth the wait."""
POLL_S = 0.02
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


@dataclass(frozen=True)
class _Rank:
    process: subprocess.Popen[bytes]
    folder: Path

    def output(self, rank: int) -> RankOutput:
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
    outputs, late = _run(module, world_size, args, timeout, env)
    if not late and any(output.returncode in NATIVE_CRASH for output in outputs):
        warnings.warn(f"{module}: a rank crashed, run again\n{_failures(outputs)}", stacklevel=2)
        outputs, late = _run(module, world_size, args, timeout, env)
    if late or any(output.returncode for output in outputs):
        reason = f"not done after {timeout:g} s" if late else "failed"
        raise RanksError(f"{module} on {world_size} ranks: {reason}\n{_failures(outputs)}")
    return outputs


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
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                variables = _environment(rank, world_size, store.port) | dict(env or {})
                ranks.append(_start(module, args, Path(temporary) / str(rank), variables))
            late = not _wait(ranks, time.monotonic() + timeout)
        finally:
            _kill(ranks)
        outputs = [rank.output(i) for i, rank in enumerate(ranks)]
    del store
    return outputs, late


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Rank 0 joins the store of the parent in place of opening one of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Ranks with uneven shards must not share compiled graphs.
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


def _start(module: str, args: Sequence[str], folder: Path, env: Mapping[str, str]) -> _Rank:
    folder.mkdir()
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.corpus.rank_main", module, *args],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # its own group: what a rank started ends with it
        )
    return _Rank(process, folder)


def _wait(ranks: Sequence[_Rank], deadline: float) -> bool:
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


def _kill(ranks: Sequence[_Rank]) -> None:
    """End what still runs, by the group that each rank leads; nothing else is touched."""
    for rank in ranks:
        if rank.process.poll() is None:
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def _failures(outputs: Sequence[RankOutput], limit: int = 6000) -> str:
    return "\n".join(
        f"[rank {o.rank}] exit code {o.returncode}\n{o.stdout[-limit // 4 :]}{o.stderr[-limit:]}"
        for o in outputs
        if o.returncode
    )
