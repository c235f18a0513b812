"""Destinations that this process writes in a thread: whoever opens one meanwhile is told to wait for it.

The lock of a destination tells the same to other processes, but the thread takes it some time after `save` returned.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptmap.errors import DestinationError
from ckptmap.storage.locks import read_owner
from ckptmap.storage.recover import lock_path

_saving: Counter[str] = Counter()
"""Absolute paths, with the number of saves in the background that write them."""


@contextmanager
def being_saved(path: Path) -> Iterator[None]:
    """Count a destination as being written while the context lasts."""
    key = os.path.abspath(path)  # noqa: PTH100 (a path need not exist)
    _saving[key] += 1
    try:
        yield
    finally:
        _saving[key] -= 1


def why_absent(path: Path) -> tuple[str, str] | None:
    """Return what writes a path that is not there yet, and what to call; None: nothing known writes it."""
    place = Path(os.path.abspath(path))  # noqa: PTH100 (as above)
    if _saving[str(place)]:
        return (
            "is being saved in the background, and not published yet",
            "call wait() of the handle that save returned (of a CheckpointManager: manager.wait()), then open it",
        )
    try:
        owner = read_owner(lock_path(place))
    except DestinationError:  # a link, or no file
        return None
    if owner is None or owner.is_gone:
        return None
    return (
        f"is being written by pid {owner.pid} on host {owner.host}, and not published yet",
        "open it again when that process has finished it",
    )
