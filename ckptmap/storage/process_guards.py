"""What a run holds still while it works: SIGTERM, torch's own threads, torchao's import."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


@contextmanager
def stopped_by_sigterm(stop: threading.Event) -> Iterator[None]:
    """SIGTERM stops the run as Ctrl-C does, unless the program handles it itself."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def one_torch_thread(wanted: bool) -> Iterator[None]:
    """Hold torch's own threads at one; no import of torch where nothing is encoded."""
    if not wanted:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


IMPORT_LINES = {"torchao": "Failed to load ", "torch.utils._pytree": "<enum "}
"""Logger -> how a line begins that each import of torchao writes where its kernels for GPUs cannot
be loaded, or torch is newer. ckptmap uses none of these kernels."""


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Around an import of torchao: these lines are of level DEBUG; all else is told as ever."""
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
