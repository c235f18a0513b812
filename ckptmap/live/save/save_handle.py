"""The handle of a save, and what becomes of an error of a save in the background that nobody waits for.

A thread has no caller that it could raise an error to. `SaveHandle.wait` raises it, else the next
`save` does, else the process warns and logs at its end: a run never loses a checkpoint in silence.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ckptmap.core.log import log
from ckptmap.errors import CkptmapError
from ckptmap.live.model.rank_group import LostRanks
from ckptmap.storage.pending_saves import being_saved

_started: list[SaveHandle] = []
"""The save that may still run, or whose error nobody has seen."""


class SaveHandle:
    """A save that may still run. `wait()` returns its notes once it is published, or raises its error.

    An error that no `wait()` has raised is raised by the next `save`; at the end of the process it
    is a warning, and an error of the logger `ckptmap`.
    """

    def __init__(
        self,
        path: Path,
        step: int | None,
        run: Callable[[], tuple[str, ...]],
        background: bool,
        begun: float | None = None,
    ) -> None:
        """`begun`: the time of `time.perf_counter` at which `save` was called."""
        begun = time.perf_counter() if begun is None else begun
        self.path = path
        self.step = step
        self._run: Callable[[], tuple[str, ...]] | None = run
        self._notes: tuple[str, ...] = ()
        self._error: BaseException | None = None
        self.is_told = False
        """Whether the next `save` has raised the error of this one."""
        self._thread: threading.Thread | None = None
        self._returned = threading.Event()
        self._pending = contextlib.ExitStack()
        self._pending.enter_context(being_saved(path))
        if background:
            self._thread = threading.Thread(target=self._work, name="ckptmap-save")
            self._thread.start()
        _started.append(self)  # after its start: a save in another thread may wait for it at once
        if not background:
            self._work()
            self.wait()
        self.blocked_s = time.perf_counter() - begun
        """Seconds for which `save` held the calling thread; of a save in the background, its copies."""
        self._returned.set()

    def __repr__(self) -> str:
        state = "running" if not self.done else "failed" if self._error else "published"
        return f"<SaveHandle {self.title}: {state}>"

    @property
    def title(self) -> str:
        """The step, where there is one, and the path."""
        return f"{self.path}" if self.step is None else f"step {self.step}, {self.path}"

    def _work(self) -> None:
        """Run the save. What it holds, all weights for one, goes with its end: a handle may be kept."""
        run, self._run = self._run, None
        assert run is not None, "it runs once"
        if self._thread is not None:
            # Else the thread that trains would wait 5 ms for Python's lock. An interrupt may keep it from returning.
            self._returned.wait(timeout=1.0)
        try:
            self._notes = run()
        except BaseException as error:  # `wait` raises it again
            expected = isinstance(error, CkptmapError) and self._thread is not None
            self._error = error.with_traceback(None) if expected else error  # frames hold values
        finally:
            self._pending.close()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def settle(self) -> BaseException | None:
        """Wait until the save has ended, and return its error, or None where it is published."""
        if self._thread is not None:
            self._thread.join()
        return self._error

    def wait(self) -> tuple[str, ...]:
        """Wait until the save is published, and return its notes.

        Raises DestinationError or RunError on all ranks where the save failed on one; the
        destination is then as it was."""
        error = self.settle()
        with contextlib.suppress(ValueError):
            _started.remove(self)
        if error is not None:
            raise error
        return self._notes


def settle_save_of(path: str | os.PathLike[str]) -> None:
    """Wait for a save in the background that writes `path`, whose values its reader wants.

    Raises the error of that save where it left nothing there, as `SaveHandle.wait` does."""
    place = Path(path).absolute()
    for handle in [*_started]:
        if handle.path == place and handle.settle() is not None and not os.path.lexists(place):
            handle.wait()


def settle_started() -> BaseException | None:
    """Wait for the save before, whose files may be the ones to replace. Return its error where nobody
    has seen it, with the step and the path of that save in its text."""
    unseen = None
    while _started:
        handle = _started.pop(0)
        error = handle.settle()
        if error is not None and unseen is None:
            unseen, handle.is_told = _named(error, handle), True
    return unseen


def _named(error: BaseException, handle: SaveHandle) -> BaseException:
    text = f"the save before, in the background ({handle.title}), failed"
    if isinstance(error, CkptmapError):
        error.message = f"{text}: {error.message}"
        way = "start the run again" if isinstance(error, LostRanks) else "call it again"
        error.hint = f"{error.hint}; this save was not begun: {way}".removeprefix("; ")
    else:
        error.add_note(f"{text}; this save was not begun: call it again")
    return error


@atexit.register
def _tell_unseen() -> None:
    """Warn of and log every error that nobody has seen. Threads have ended before: Python joins them."""
    for handle in _started:
        error = handle.settle()
        if error is not None:
            text = f"a save in the background failed ({handle.title}): {error}"
            log.error(text)
            warnings.warn(f"ckptmap: {text}", RuntimeWarning, stacklevel=1)
