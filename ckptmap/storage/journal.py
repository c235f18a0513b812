"""The journal of a run: one JSON line for each finished unit of work, so that a run can continue.

The first line holds the digest of the plan that the journal belongs to, and what tells that nobody
has touched the files of the source. A unit's line is added after its writes have returned. It ends with its own CRC-32: a line that a killed run wrote in part,
or that was damaged, is a unit that was not written, and so are those after it. The next run trusts
an entry only after it has read the bytes back and compared their digests.

Each rank has its own journal. Rank 0 opens first, and moves the entries of all ranks of an earlier
run, however many they were, into its own. A journal is locked as long as its writer lives: a rank
of an earlier run that hung and goes on would write into the files of this run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckptmap.core.json_text import parse_json
from ckptmap.errors import DestinationError, RunError
from ckptmap.storage.own_files import open_plain, read_plain, write_new


class Written(NamedTuple):
    """The record of a slot (the place of one chunk in an output file) that was written.

    file    index of the output file in the plan
    slot    index of the slot in that file
    digest  xxh3 of its bytes, 64 bits, in hex; "" if digests are off
    crc32   CRC-32 of its bytes; 0 if the container stores none
    """

    file: int
    slot: int
    digest: str
    crc32: int


class Journal:
    """An append-only file of finished units, which threads can share.

    `path` is the journal of rank 0. Rank R opens `journal-R.jsonl` beside it, after rank 0 has
    opened its own. Entries of another plan are discarded, and those of other source files: see
    `source_changes.file_states`. Raises DestinationError CKM305 if a rank of an earlier run still
    holds its journal, RunError CKM306 if the file cannot be written.
    """

    def __init__(self, path: Path, plan_digest: str, rank: int = 0, source: str = "") -> None:
        self._lead = path
        self._head = {"plan": plan_digest, "source": source}
        self.begins_anew = False
        """Whether an earlier run of the plan was discarded, because the source files were touched."""
        self.path = path.with_name(f"{path.stem}-{rank}{path.suffix}") if rank else path
        self.entries: dict[str, Sequence[Written]] = {}
        """Unit name -> the slots that an earlier run wrote for it. Their bytes are not verified
        yet."""
        self._lock = threading.Lock()
        try:
            self._fd = self._begin(path, rank)
        except DestinationError:
            raise
        except OSError as error:
            raise _failed(self.path, error) from error
        _flock(self._fd)

    def _begin(self, path: Path, rank: int) -> int:
        theirs = [] if rank else _of_other_ranks(path)
        for file in (path, *theirs):
            self.entries |= self._entries(file)
        temporary = self.path.with_name(self.path.name + ".new")
        # The file is rewritten, so that no partly written line stays in the middle.
        lines = [json.dumps(self._head)]
        if rank == 0:
            lines += [_line(unit, slots) for unit, slots in self.entries.items()]
        write_new(temporary, ["".join(line + "\n" for line in lines).encode()])
        os.replace(temporary, self.path)
        for file in theirs:
            _refuse_if_locked(file)
            file.unlink()
        return open_plain(self.path, os.O_WRONLY | os.O_APPEND)

    def _entries(self, path: Path) -> dict[str, Sequence[Written]]:
        """Return the units of an earlier run of the same plan; empty if there was none."""
        content = read_plain(path)
        first, *lines = (content or b"").decode(errors="replace").split("\n")
        head = _parse(first)
        if head != self._head:
            is_same_plan = isinstance(head, dict) and head.get("plan") == self._head["plan"]
            self.begins_anew |= is_same_plan and any(lines)
            return {}
        entries: dict[str, Sequence[Written]] = {}
        for line in lines:
            entry = _unit(line)
            if entry is None:
                break  # lines after a damaged one are not trusted either
            entries[entry[0]] = entry[1]
        return entries

    def add(self, unit: str, slots: Sequence[Written]) -> None:
        """Record a unit whose writes have returned. On return the kernel has the line."""
        data = (_line(unit, slots) + "\n").encode()
        with self._lock:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except OSError as error:
                    raise _failed(self.path, error) from error

    def void(self) -> None:
        """Let no later run trust an entry of any rank: a journal without its first line has none."""
        for file in (self._lead, *_of_other_ranks(self._lead)):
            with contextlib.suppress(OSError, DestinationError):  # rank 0 may have removed it
                fd = open_plain(file, os.O_WRONLY)
                try:
                    os.ftruncate(fd, 0)
                finally:
                    os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
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
        fd = open_plain(path, os.O_RDONLY)
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
            "end that process, then run the same command again",
        )


def _flock(fd: int) -> bool:
    """Lock a file for as long as it is open.

    Returns False if another process holds the lock, True also on a filesystem without locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _line(unit: str, slots: Sequence[Written]) -> str:
    body = json.dumps({"unit": unit, "slots": slots}, separators=(",", ":"))[:-1]
    return body + _line_end(body)


def _line_end(body: str) -> str:
    """Return the last member of a line: the CRC-32 of the text before it."""
    return f',"crc32":"{zlib.crc32(body.encode()):08x}"}}'


def _parse(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _unit(line: str) -> tuple[str, Sequence[Written]] | None:
    """Return the unit that a line records; None for a damaged line."""
    body = line[: -len(_line_end(""))]
    if line != body + _line_end(body):
        return None
    value = _parse(line)
    try:
        slots = tuple(Written(*slot) for slot in value["slots"])
        unit = value["unit"]
    except (KeyError, TypeError):
        return None
    return (unit, slots) if isinstance(unit, str) and all(map(_is_sound, slots)) else None


def _is_sound(slot: Written) -> bool:
    """Return whether a slot's numbers are in range: bool and float, as JSON may have them, are not."""
    numbers = type(slot.file) is type(slot.slot) is type(slot.crc32) is int
    return numbers and 0 <= slot.crc32 < 1 << 32 and isinstance(slot.digest, str)
