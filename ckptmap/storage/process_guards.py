"""Context managers for the state of the process: signals that end it, torch's threads, torchao's log lines.

Each sets its state for the time of a run, and puts back what was there before.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


ENDING = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGHUP"))
"""Signals that end a run as Ctrl-C does; SIGHUP comes when a terminal is closed, and Windows has none."""


@contextmanager
def ending_signals(handler: Handler, kept: Callable[[object], bool]) -> Iterator[None]:
    """Set the handler of the signals that end a run, but for those whose handler is to be kept.

    Outside the main thread, where Python sets none, nothing is done.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in ENDING if main}
    # None: a handler of C code, which Python cannot put back.
    ours = [number for number, old in before.items() if old is not None and not kept(old)]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def stopped_by_signals(stop: threading.Event) -> AbstractContextManager[None]:
    """Set `stop` at a signal that ends a run, as at Ctrl-C; a handler of the program is kept."""
    return ending_signals(lambda number, frame: stop.set(), lambda old: old is not signal.SIG_DFL)


@contextmanager
def one_torch_thread(wanted: bool) -> Iterator[None]:
    """Set torch to one thread, because the run has threads of its own, or because a sum depends on how
    it is split, and must have the same bits everywhere. `wanted` False: torch is not imported."""
    if not wanted:
        yield
        return
    import torch

    before = torch.get_num_threads()
    # Set although it may be 1: the first call in a forked process makes torch's thread pool anew, and
    # two threads that do that at once meet "Invalid thread pool!".
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


IMPORT_LINES = {"torchao": "Failed to load ", "torch.utils._pytree": "<enum "}
"""Logger -> start of the warning that torchao logs at import where its GPU kernels cannot be loaded,
or torch is newer. ckptmap uses none of these kernels."""


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Log the lines of `IMPORT_LINES` at level DEBUG while torchao is imported; others are unchanged."""
    import logging

    quieted = {logging.getLogger(name): _quieter(begin) for name, begin in IMPORT_LINES.items()}
    for logger, quieter in quieted.items():
        logger.addFilter(quieter)
    try:
        yield
    finally:
        for logger, quieter in quieted.items():
            logger.removeFilter(quieter)


def _quieter(begin: str) -> Callable[[logging.LogRecord], bool]:
    import logging

    def kept(record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING and record.getMessage().startswith(begin):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True

    return kept
