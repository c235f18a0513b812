"""Which way bytes take to a file: through the page cache, or past it to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

WINDOW = 64 << 20
"""Bytes over which a pace is taken."""
FAST = 1.5e9
"""Bytes a second at which nothing faster is looked for: what memory takes where it is at hand. On
virtual machines it may not be: pages that the host took back come at a tenth of that."""


class Pace:
    """Bytes a second of what any threads write, over the last whole window; 0.0 before that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing, self._since = 0, 0.0
        self._nbytes, self._seconds = 0, 0.0
        self.rate = 0.0

    @contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        """While so many bytes are written."""
        with self._lock:
            if not self._writing:
                self._since = time.monotonic()
            self._writing += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing -= 1
                self._count(nbytes, time.monotonic())

    def _count(self, nbytes: int, now: float) -> None:
        self._seconds += now - self._since
        self._since = now
        self._nbytes += nbytes
        if self._nbytes >= WINDOW:
            self.rate = self._nbytes / max(self._seconds, 1e-9)
            self._nbytes, self._seconds = 0, 0.0


class Ways:
    """Past the page cache: what is waited for arrives sooner, and costs no memory and less CPU."""

    def __init__(self) -> None:
        self.cache, self.disk = Pace(), Pace()

    @property
    def past_cache(self) -> bool:
        """Shall large writes go to the disk at once?"""
        return True


class Fastest(Ways):
    """Where nobody waits for the disk: the page cache, but for where the disk is faster."""

    @property
    def past_cache(self) -> bool:
        if not self.cache.rate or self.cache.rate >= FAST:
            return False
        return not self.disk.rate or self.disk.rate > self.cache.rate
