"""Who holds a lock."""

from __future__ import annotations

from pathlib import Path

from ckptmap.storage.locks import Owner, _parsed


def read_owner(lock: Path) -> Owner | None:
    """Return the owner that a lock file names; None where there is no file, or none that a lock has written."""
    return _parsed(lock.read_bytes()) if lock.exists() else None
