"""Progress of a command on stderr: a live line by rich on a terminal, elsewhere a line now and then.

The live line appears when a command has taken longer than a blink: a short one never imports rich.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

from ckptmap.core.formatting import human
from ckptmap.core.printable import one_line
from ckptmap.execution.phases import ProgressLines
from ckptmap.protocols.progress import DOWNLOADING, IMPORTING, READING, UPLOADING, Progress

from .printer import Printer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import Task

DELAY_S = 0.4
"""Seconds before the live line appears."""
READING_DELAY_S = 1.0
"""The same of a command that reads headers alone, most of which need less."""
NARROW = 80
"""Columns of a terminal below which the line has no bar."""
OF_THE_HUB = (DOWNLOADING, UPLOADING)
"""Phases in which huggingface_hub shows bars of its own, one a file."""


@contextmanager
def shown(quiet: bool = False, rank: int = 0) -> Iterator[Progress | bool]:
    """Give the `progress` of a call: False where nothing is shown, and on all ranks but the first."""
    if quiet or rank:
        yield False
        return
    display = LiveLine() if _is_live() else ProgressLines()
    try:
        yield display
    finally:
        display.close()


@contextmanager
def shown_while_reading() -> Iterator[None]:
    """Show the phase of a command that reads headers and prints what it found, on a terminal alone.

    Such a command stands in pipes and scripts, where a line now and then would be noise.
    """
    if not (_is_live() and sys.stdout.isatty()):
        yield
        return
    line = LiveLine(READING_DELAY_S)
    line(READING, 0, 0, "")
    imports = ToldImports(line)
    sys.meta_path.insert(0, imports)
    try:
        yield
    finally:
        sys.meta_path.remove(imports)
        line.close()


class ToldImports(MetaPathFinder):
    """Finds no module, and tells when torch is looked for: its import takes seconds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torch":
            self._progress(IMPORTING, 0, 0, "")


def _is_live() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class LiveLine:
    """A line with phase, share, bytes, rate and tensor, which is erased at the end."""

    def __init__(self, delay_s: float | None = None) -> None:
        self._lock = threading.RLock()
        self._now = ("", 0, 0, "")
        self._is_closed = False
        self._bars: RichProgress | None = None
        self._timer = threading.Timer(DELAY_S if delay_s is None else delay_s, self._open)
        self._timer.daemon = True
        self._timer.start()

    def __call__(self, phase: str, done: int, total: int, name: str, /) -> None:
        with self._lock:
            before, self._now = self._now[0], (phase, done, total, name)
            if self._bars is not None:
                self._show(self._bars, before)

    def close(self) -> None:
        """Erase the line."""
        self._timer.cancel()
        with self._lock:
            self._is_closed, bars, self._bars = True, self._bars, None
        Printer.before_stderr = None
        if bars is not None:
            bars.stop()

    def _open(self) -> None:
        bars = rich_line()
        with self._lock:
            if self._is_closed:
                return
            self._bars = bars
            Printer.before_stderr = _erase
            bars.add_task("", total=None, key="")
            self._show(bars, "")
            if self._now[0] not in OF_THE_HUB:
                bars.start()

    def _show(self, bars: RichProgress, before: str) -> None:
        phase, done, total, name = self._now
        task = bars.tasks[0].id
        if phase == before:
            bars.update(task, total=total or None, completed=done, key=one_line(name))
            return
        bars.reset(task, total=total or None, completed=done, description=phase, key=one_line(name))
        if phase in OF_THE_HUB:
            bars.stop()
        elif before in OF_THE_HUB:
            bars.start()


def rich_line(console: Console | None = None) -> RichProgress:
    """Return rich's display of one line; names of tensors in it are no markup."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column
    from rich.text import Text

    class Told(ProgressColumn):
        def render(self, task: Task) -> Text:
            text = f"{task.description}  {bytes_of(task)}  {task.fields['key']}"
            return Text(text, no_wrap=True, overflow="ellipsis")  # one column: a name is cut first

    console = console or Console(stderr=True)
    bar = [BarColumn(bar_width=20)] if console.width >= NARROW else []
    columns = [SpinnerColumn(), *bar, Told(table_column=Column(no_wrap=True))]
    return RichProgress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    )


def bytes_of(task: Task) -> str:
    """`42%  1.0 GiB of 2.3 GiB  820.0 MiB/s  1 s left`; the seconds where bytes are not counted."""
    if not task.total:
        return f"{task.elapsed or 0:.0f} s"
    parts = [f"{task.percentage:.0f}%", f"{human(int(task.completed))} of {human(int(task.total))}"]
    speed = task.speed or task.finished_speed
    if speed:
        left = (task.total - task.completed) / speed
        parts += [f"{human(int(speed))}/s", f"{left:.0f} s left"]
    return "  ".join(parts)


def _erase() -> None:
    """Erase the live line, in whose place something else is written; rich draws it again."""
    sys.stderr.write("\r\x1b[2K")
    sys.stderr.flush()
