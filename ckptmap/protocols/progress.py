"""What a call tells of its progress: the phase it is in, and how many bytes of it are done."""

from __future__ import annotations

from typing import Protocol

READING = "reading headers"
IMPORTING = "importing torch"
COPYING = "copying"
CONVERTING = "converting"
HASHING = "hashing"
COMPARING = "comparing"
PROVING = "proving"
SYNCING = "syncing"
DOWNLOADING = "downloading"
UPLOADING = "uploading"
PHASES = (
    READING, IMPORTING, DOWNLOADING, COPYING, CONVERTING, HASHING, COMPARING, PROVING, SYNCING,
    UPLOADING,
)  # fmt: skip


class Progress(Protocol):
    """A function that a call tells its progress, from any thread, one call at a time.

    phase  one of `PHASES`
    done   bytes of the phase that are done
    total  bytes of the whole phase; 0 where they are not known, or nothing is counted
    name   the tensor or file that was worked on last; "" at the start of a phase

    An exception that it raises stops the work, which the same call continues later.
    """

    def __call__(self, phase: str, done: int, total: int, name: str, /) -> None: ...
