"""Progress of a run: a live line on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import shutil
import sys
import threading
import time

from ckptmap.core.formatting import human
from ckptmap.core.printable import one_line

EVERY_LIVE_S = 0.1
EVERY_LOG_S = 10.0


class Progress:
    """A progress line; call it with the bytes done since the last call and their tensor."""

    def __init__(self, total_nbytes: int) -> None:
        self.total_nbytes = total_nbytes
        self.done_nbytes = 0
        self._live = sys.stderr.isatty()
        self._start = self._last_line_at = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, nbytes: int, name: str) -> None:
        with self._lock:
            self.done_nbytes += nbytes
            now = time.monotonic()
            if now - self._last_line_at < (EVERY_LIVE_S if self._live else EVERY_LOG_S):
                return
            self._last_line_at = now
            self._print(self.line(now - self._start, one_line(name)))

    def line(self, seconds: float, name: str) -> str:
        """`42%  1.0 GB of 2.3 GB  820.0 MB/s  1 s left  model.norm.weight`"""
        done, total = self.done_nbytes, max(self.total_nbytes, self.done_nbytes, 1)
        rate = done / seconds if seconds > 0 else 0.0
        left = f"{(total - done) / rate:.0f} s left" if rate else "starting"
        return (
            f"{100 * done // total:3d}%  {human(done)} of {human(total)}  {human(int(rate))}/s"
            f"  {left}  {name}"
        )

    def _print(self, line: str) -> None:
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            line = "\r\x1b[2K" + line[:width]
        else:
            line += "\n"
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
        except OSError:
            pass  # nobody reads it; the run goes on

    def close(self) -> None:
        """Erase the live line."""
        if self._live:
            self._print("")
