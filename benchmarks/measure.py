"""Measure programs as whole processes, on a machine that is kept in the same state between runs.

CPU time is user + system time of the process and its children, by wait4. Peak anonymous memory is
RssAnon + RssShmem (anonymous shared `mmap` buffers count as the latter) over the process tree,
sampled. The machine must have that memory, while it can drop cached pages of files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 0.01
BLOCK = 8 << 20
FREE_NBYTES = 700 << 20
"""Before each run, free memory is reduced below this: see `Filler`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one run: wall and CPU seconds, and anonymous memory at the peak."""

    wall_s: float
    cpu_s: float
    anon_nbytes: int


class ContestantError(RuntimeError):
    """A measured program ended with an exit code other than 0."""


def run(argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Sample:
    """Run one process and return its measurements.

    Raises ContestantError, with the end of its stderr, if its exit code is not 0.
    """
    with tempfile.TemporaryFile() as errors:
        started = time.monotonic()
        process = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=errors,
        )  # fmt: skip
        watch = _Watch(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        peak = watch.stop()
        if process.returncode != 0:
            errors.seek(0)
            tail = errors.read()[-2000:].decode(errors="replace")
            raise ContestantError(f"exit code {process.returncode}: {' '.join(argv)}\n{tail}")
    return Sample(wall, usage.ru_utime + usage.ru_stime, peak)


class _Watch:
    """Samples the memory of a process and its children until stopped."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peak, self._ended = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._peak = max(self._peak, sum(map(_anon_nbytes, _tree(self._pid))))

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._peak


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _tree(int(child))


def _anon_nbytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    wanted = [line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(int(fields[1]) << 10 for fields in wanted)


# ----------------------------------------------------------------------------- the machine


class Filler:
    """Keeps free memory small: fills the page cache with the pages of a sparse file.

    Some virtual machines return freed memory to their host at once. The next process that uses it
    waits for the host, at a tenth of the speed of memory. If little memory is free, new pages are
    taken from the page cache instead, for every contestant alike.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._nbytes = _meminfo("MemTotal")
        with path.open("ab") as file:
            file.truncate(self._nbytes)
        self._buffer = bytearray(BLOCK)

    def fill(self) -> None:
        """Read the next parts of the file until little memory is free."""
        last = self._nbytes
        with self._path.open("rb", buffering=0) as file:
            while _meminfo("MemFree") > FREE_NBYTES and last > 0:
                file.seek(self._at)
                count = file.readinto(self._buffer)
                self._at = (self._at + BLOCK) % self._nbytes
                last -= max(count, 1)


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return 0


def prepare(destination: Path, source: Path, filler: Filler | None) -> None:
    """Prepare a run: remove the destination, sync, and read the source into the page cache."""
    if destination.is_dir():
        shutil.rmtree(destination)
    destination.unlink(missing_ok=True)
    os.sync()
    if filler is not None:
        filler.fill()
    warm(source)


def warm(source: Path) -> None:
    buffer = bytearray(BLOCK)
    for path in _files(source):
        is_sparse = path.stat().st_blocks * 512 < path.stat().st_size // 2
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer) and not is_sparse:  # holes follow the header
                pass


def _files(path: Path) -> Iterable[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def nbytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def rounds(
    contestants: Mapping[str, Callable[[], Sample]], count: int, slow: Mapping[str, int]
) -> dict[str, list[Sample]]:
    """Run the contestants `count` times in turn, A B C A B C, after one warm-up of each.

    A contestant in `slow` has no warm-up and only `slow[name]` runs. Returns the samples by name.
    """
    found: dict[str, list[Sample]] = {name: [] for name in contestants}
    for number in range(count + 1):
        for name, once in contestants.items():
            if name not in slow:
                sample = once()
                if number:
                    found[name].append(sample)
            elif len(found[name]) < slow[name]:
                found[name].append(once())
    return found
