"""Cheap fingerprints of a checkpoint: the sizes and last bytes of a few of its files.

Ranks compare them to notice that they load different checkpoints. Paths and times do not count:
each node may have a copy of its own.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

from ckptmap.checkpoint.checkpoint import Checkpoint

FILES = 8
TAIL_NBYTES = 4096
"""In a zip these bytes hold the CRCs of all records; elsewhere values."""


def content_facts(checkpoint: Checkpoint) -> dict[str, str]:
    """Return file name -> size and digest; empty for a checkpoint on the Hub, whose commit is pinned."""
    if checkpoint.origin:
        return {}
    found = {}
    for file in sorted(checkpoint.fingerprints)[:FILES]:
        inside = os.path.relpath(file, checkpoint.path)
        with suppress(OSError):  # a file that is gone raises its own error when it is read
            found["the file" if inside == "." else inside] = _fact(file)
    return found


def _fact(file: str) -> str:
    with open(file, "rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - TAIL_NBYTES))
        tail = hashlib.blake2b(opened.read(), digest_size=8).hexdigest()
    return f"{size} bytes, {tail}"
