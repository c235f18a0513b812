"""The journal of a run: one JSON line for each finished unit, so that a killed run can continue.

The first line binds the journal to a plan's digest. A line is added after the unit's writes have
returned; a torn last line is dropped. Nothing in it is believed before the bytes were read back.

Each rank has a journal of its own; rank 0 opens first and takes what the ranks of an earlier run
left, however many they were, into its own. A journal is locked as long as its writer lives: a rank
of an earlier run that hangs and comes back would write into this one's files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ckptmap.errors import DestinationError, RunError


class Written(NamedTuple):
    """A slot that was written: digest (xxh3, 64 bit, hex; "" where not wanted) and CRC-32 (0 where
    not wanted)."""

    file: int
    slot: int
    digest: str
    crc32: int


class Journal:
    """Append-only, safe to share between threads. A file of another plan is begun anew.

    `path` is rank 0's; other ranks open theirs, `journal-R.jsonl` beside it, once rank 0 has.
    Raises DestinationError CKM305 where a process of an earlier run still writes, RunError CKM306
    where it cannot be written.
    """

    def __init__(self, path: Path, plan_digest: str, rank: int = 0) -> None:
        self.path = path.with_name(f"{path.stem}-{rank}{path.suffix}") if rank else path
        self.entries: dict[str, Sequence[Written]] = {}
        """Units of an earlier run, by unit id. Their bytes are not verified yet."""
        self._lock = threading.Lock()
        try:
            self._fd = self._begin(path, plan_digest, rank)
        except DestinationError:
            raise
        except OSError as error:
            raise _failed(self.path, error) from error
        _flock(self._fd)

    def _begin(self, path: Path, plan_digest: str, rank: int) -> int:
        theirs = [] if rank else _of_other_ranks(path)
        for file in (path, *theirs):
            self.entries |= _entries(file, plan_digest)
        temporary = self.path.with_name(self.path.name + ".new")
        # Rewritten whole, so that no torn line stays in the middle.
        lines = [json.dumps({"plan": plan_digest})]
        if rank == 0:
            lines += [_line(unit, slots) for unit, slots in self.entries.items()]
        temporary.write_text("".join(line + "\n" for line in lines))
        os.replace(temporary, self.path)
        for file in theirs:
            _refuse_if_locked(file)
            file.unlink()
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def add(self, unit: str, slots: Sequence[Written]) -> None:
        """Record a unit whose writes have returned; the line is with the OS on return."""
        data = (_line(unit, slots) + "\n").encode()
        with self._lock:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except OSError as error:
                    raise _failed(self.path, error) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _failed(path: Path, error: OSError) -> RunError:
    return RunError(
        "CKM306",
        f"{path}: write failed: {error.strerror}",
        "free some space, then run the same command again to continue",
    )


def _of_other_ranks(path: Path) -> list[Path]:
    pattern = re.compile(rf"{re.escape(path.stem)}-\d+{re.escape(path.suffix)}")
    return sorted(file for file in path.parent.iterdir() if pattern.fullmatch(file.name))


def _refuse_if_locked(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        held = not _flock(fd)
    finally:
        os.close(fd)
    if held:
        raise DestinationError(
            "CKM305",
            f"{path}: is still held by a rank of an earlier run",
            "end that process, then run again",
        )


def _flock(fd: int) -> bool:
    """Lock a file for as long as it is open. Return False if another process holds the lock; True also
    on a filesystem without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _line(unit: str, slots: Sequence[Written]) -> str:
    return json.dumps({"unit": unit, "slots": slots}, separators=(",", ":"))


def _entries(path: Path, plan_digest: str) -> dict[str, Sequence[Written]]:
    """Return the units of an earlier run of the same plan; empty where there was none."""
    try:
        first, *lines = path.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return {}
    if _parse(first) != {"plan": plan_digest}:
        return {}
    entries: dict[str, Sequence[Written]] = {}
    for line in lines:
        found = _unit(_parse(line))
        if found is None:
            break  # what follows a torn line is not trusted either
        entries[found[0]] = found[1]
    return entries


def _parse(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _unit(value: Any) -> tuple[str, Sequence[Written]] | None:
    try:
        slots = tuple(
            Written(int(file), int(slot), str(digest), int(crc))
            for file, slot, digest, crc in value["slots"]
        )
        return str(value["unit"]), slots
    except (KeyError, TypeError, ValueError):
        return None
