"""Run seeded cases in forked processes with limits, and count their outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ckptmap.error_codes import CODES
from ckptmap.errors import CkptmapError

CPU_S, IDLE_S = 30, 10
"""A case hangs that needs more of the processor's time, or none of it for so long twice, though it is
not waiting for a processor: the machine may be busy."""
GROWTH = 1 << 30
"""Bytes that a case may need beyond those of the process that forks it."""
ADDRESS_SPACE = 4 << 30
TOGETHER = 40
"""How many cases one process runs, one after the other: a fork costs as much as a case. Where one of
them ends its process, the next ones run in another."""
BEGUN = "begun"
"""The result of a case of which nothing is known yet."""
_GROUP = os.getpgrp()


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `result` is among the good ones of its program, or is the kind of finding."""

    result: str
    subject: str
    label: str
    text: str = ""


@dataclass(frozen=True)
class Finding:
    """An outcome that breaks a promise; `replay` runs its case again."""

    outcome: Outcome
    replay: str


class Program(Protocol):
    """One kind of torture."""

    name: str
    good: frozenset[str]

    def case(self, draw: random.Random, folder: Path) -> Iterator[Outcome]:
        """Run one case in an empty folder; it is called in another process than `__init__`.

        Yields what is about to be done, for the case that the process ends, and then the outcome.
        """


@dataclass
class Tally:
    """The outcomes of a run."""

    program: str
    seed: int
    results: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {result}" for result, n in sorted(self.results.items()))
        said = f"{len(self.findings)} findings"
        return f"{self.program}: {self.results.total()} cases, seed {self.seed}: {counts}; {said}"

    def to_json(self) -> list[dict[str, object]]:
        return [asdict(finding) for finding in self.findings]


def run(
    program: Program,
    seed: int,
    cases: Sequence[int],
    folder: Path,
    flags: str = "",
    tell: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Run the cases and return what was found.

    flags  those of the command line that a case depends on, for replays
    tell   is given a line for each finding
    """
    tally = Tally(program.name, seed)
    for number, outcome in outcomes(program, seed, cases, folder):
        tally.results[outcome.result] += 1
        if outcome.result in program.good:
            continue
        replay = f"python -m tests.torture {program.name} --seed {seed} --case {number}{flags}"
        tally.findings.append(Finding(outcome, replay))
        tell(
            f"{replay}: {outcome.result}: {outcome.subject}: {outcome.label}: {outcome.text[:600]}"
        )
    return tally


def outcomes(
    program: Program, seed: int, cases: Sequence[int], folder: Path
) -> Iterator[tuple[int, Outcome]]:
    """Yield the number and the outcome of every case."""
    left = list(cases)
    while left:
        ended: list[Outcome] = []
        for outcome in in_child(lambda: _one_by_one(program, seed, left[:TOGETHER], folder)):  # noqa: B023
            if outcome.result == BEGUN and not outcome.subject:
                ended.append(outcome)
            else:
                ended[-1] = outcome
        for number, outcome in zip(left, ended, strict=False):
            place = folder / f"case-{number}"
            if place.exists():  # its process was ended
                remove(place)
            yield number, outcome
        left = left[len(ended) :]


def _one_by_one(
    program: Program, seed: int, cases: Sequence[int], folder: Path
) -> Iterator[Outcome]:
    """Run cases in this process: yield an outcome without a subject before those of each case."""
    for number in cases:
        yield Outcome(BEGUN, "", "")
        place = folder / f"case-{number}"
        place.mkdir()
        limit_processor_time()
        yield from _worked(lambda: program.case(draw(program, seed, number), place))  # noqa: B023
        remove(place)


def draw(program: Program, seed: int, number: int) -> random.Random:
    return random.Random(f"{program.name}:{seed}:{number}")


def remove(place: Path) -> None:
    for path in [place, *place.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(place)


# ------------------------------------------------------------------------------- processes


def forked(work: Callable[[], Iterator[Outcome]]) -> Outcome:
    """Return the last outcome that `work` yields in a child process, or what became of the child."""
    return deque(in_child(lambda: _worked(work)), maxlen=1)[0]


def in_child(work: Callable[[], Iterator[Outcome]]) -> Iterator[Outcome]:
    """Yield what `work` yields in a child process; then, where the child did not end well, its last
    outcome with what became of the child."""
    sys.stdout.flush()
    receive, send = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(receive)
        if os.getpgrp() == _GROUP:  # else within a case, whose group ends as one
            os.setpgid(0, 0)
        _limit()
        _make_thread_pool()
        with os.fdopen(send, "w") as stream:
            for outcome in work():
                print(json.dumps(asdict(outcome)), file=stream, flush=True)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        lines = b"".join(_until_end(stream.fileno(), pid)).splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    last = Outcome("", "", "")
    for line in lines:
        last = Outcome(**json.loads(line))
        yield last
    if status != 0:
        hung = status in (-signal.SIGXCPU, -signal.SIGKILL)
        result = "hang" if hung else "died"
        yield replace(
            last,
            subject=last.subject or "?",
            result=result,
            text=f"its process ended with {status}",
        )


def _make_thread_pool() -> None:
    """Let one thread make torch's pool anew. A child's first use of it does, and transformers, which loads weights by
    several threads, once met a pool that another thread was just making ("Invalid thread pool!")."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of torch
        return os.fork()


def _limit() -> None:
    """Bound the processor's time and the memory of this process; silence what libraries print."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.getrlimit(resource.RLIMIT_AS)[1]))
    limit_processor_time()
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)


def limit_processor_time() -> None:
    """Let this process use `CPU_S` more seconds of the processor."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _worked(work: Callable[[], Iterator[Outcome]]) -> Iterator[Outcome]:
    Path("/proc/self/clear_refs").write_text("5")  # forget what earlier cases needed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = Outcome("", "", "")
    try:
        for outcome in work():
            yield outcome
    except BaseException:
        yield replace(outcome, result="torture-error", text=traceback.format_exc()[-400:])
        return
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > GROWTH:
        yield replace(outcome, result="memory", text=f"{grown} bytes; {outcome.text}")


def _until_end(fd: int, pid: int) -> Iterator[bytes]:
    """Yield what the child sends. One that waits for something, and for too long, is killed."""
    used = -1
    while True:
        ready, _, _ = select.select([fd], [], [], IDLE_S if os.getpgid(pid) == pid else IDLE_S / 2)
        if not ready:
            before, (used, is_ready) = used, _used(os.getpgid(pid))
            if is_ready or used != before:
                continue
            os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(
                pid, signal.SIGKILL
            )
            return
        data = os.read(fd, 1 << 16)
        if not data:
            return
        yield data


def _used(group: int) -> tuple[int, bool]:
    """Return the processor's time that the processes of a group have used, in ticks, and whether one of
    them is running, or waits for a processor or a disk."""
    total, is_ready = 0, False
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            values = file.read_text().rpartition(")")[2].split()  # from field 3 of proc(5) on
            if int(values[2]) == group:
                total += int(values[11]) + int(values[12])
                is_ready |= values[0] in ("R", "D")
    return total, is_ready


# ------------------------------------------------------------------------------- errors


def refusal(error: BaseException) -> tuple[str, str]:
    """Return ("refused", text) for an expected error, ("internal", text) for any other."""
    if isinstance(error, CkptmapError) and error.code in CODES:
        return "refused", f"{error.code} {error}"
    trace = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in trace)
    return "internal", f"{type(error).__name__}{where}: {str(error)[:300]}"
