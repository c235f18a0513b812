"""Progress of a run in a Python program: a line on stderr every few seconds."""

from __future__ import annotations

import sys
import time

from ckptmap.core.formatting import human
from ckptmap.core.printable import one_line
from ckptmap.planning.options import Progress

EVERY_S = 5.0


def progress_lines(total_nbytes: int) -> Progress:
    """Return a function that adds up the bytes it is given, and prints a line when one is due."""
    done_nbytes, due = 0, time.monotonic() + EVERY_S

    def report(nbytes: int, key: str) -> None:
        nonlocal done_nbytes, due
        done_nbytes += nbytes
        if time.monotonic() >= due:
            due = time.monotonic() + EVERY_S
            print(
                f"{human(done_nbytes)} of {human(total_nbytes)}  {one_line(key)}", file=sys.stderr
            )

    return report
