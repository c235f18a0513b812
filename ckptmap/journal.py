"""What is already written: one JSON line a finished unit, so that a killed run can continue.

The first line binds the journal to a plan's digest. A line is added after the unit's writes have
returned; a torn last line is dropped. Nothing in it is believed before the bytes were read back.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ckptmap.errors import RunError


@dataclass(frozen=True, slots=True)
class Written:
    """A slot that was written: digest (xxh3, 64 bit, hex) and CRC-32 (0 where not wanted)."""

    file: int
    slot: int
    digest: str
    crc32: int


class Journal:
    """Append-only, safe to share between threads. A file of another plan is begun anew."""

    def __init__(self, path: Path, plan_digest: str) -> None:
        self.entries: Mapping[str, Sequence[Written]] = _entries(path, plan_digest)
        """Units found at the start, by unit id; not verified."""
        self.path = path
        self._lock = threading.Lock()
        temporary = path.with_name(path.name + ".new")
        # Rewritten whole, so that no torn line stays in the middle.
        lines = [json.dumps({"plan": plan_digest})]
        lines += [_line(unit, slots) for unit, slots in self.entries.items()]
        temporary.write_text("".join(line + "\n" for line in lines))
        os.replace(temporary, path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def add(self, unit: str, slots: Sequence[Written]) -> None:
        """Record a unit whose writes have returned; the line is with the OS on return."""
        data = (_line(unit, slots) + "\n").encode()
        with self._lock:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except OSError as error:
                    raise RunError(
                        "CKM306",
                        f"{self.path}: write failed: {error.strerror}",
                        "free some space, then run the same command again to continue",
                    ) from error

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


def _line(unit: str, slots: Sequence[Written]) -> str:
    rows = [[slot.file, slot.slot, slot.digest, slot.crc32] for slot in slots]
    return json.dumps({"unit": unit, "slots": rows}, separators=(",", ":"))


def _entries(path: Path, plan_digest: str) -> dict[str, Sequence[Written]]:
    """Units of an earlier run of the same plan; empty where there was none."""
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


def _parse(line: str) -> Any:
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
