"""The phases of a call: which one it is in, and its bytes so far, for `Progress` and the log."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from ckptmap.core import argument_checks
from ckptmap.core.formatting import human
from ckptmap.core.log import log
from ckptmap.core.printable import one_line
from ckptmap.protocols.progress import CONVERTING, COPYING, IMPORTING, Progress

EVERY_S = 10.0
"""Seconds between two printed lines."""


class Phases:
    """Tells a `Progress` and the log what a call does. Threads may share one."""

    def __init__(self, told: Progress | None = None) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._phase, self._done, self._total = "", 0, 0

    @classmethod
    def of(cls, progress: bool | Progress | None) -> Phases:
        """Return the phases of a call by its argument `progress`; those of a call that this one is
        a part of, if it gave them.

        True prints lines on stderr. Raises ArgumentError CKM516 for what is no such function.
        """
        if isinstance(progress, Phases):
            return progress
        argument_checks.callback("progress", progress)
        if progress is True:
            return cls(ProgressLines())
        return cls(_with_phase(progress) if progress else None)

    @classmethod
    def on_rank(cls, rank: int, progress: bool | Progress | None) -> Phases:
        """Return the phases of one of several ranks: lines are printed by the first alone."""
        return cls() if progress is True and rank else cls.of(progress)

    def __call__(self, phase: str, done: int, total: int, name: str, /) -> None:
        """Pass on what a part of the work tells."""
        if self._told is not None:
            self._told(phase, done, total, name)

    def begin(self, phase: str, total: int = 0) -> None:
        """Begin a phase of `total` bytes."""
        log.info("%s", phase)
        with self._lock:
            self._phase, self._done, self._total = phase, 0, total
            self(phase, 0, total, "")

    def advance(self, nbytes: int, name: str) -> None:
        """Count bytes of the phase that were done for a tensor or a file."""
        with self._lock:
            self._done += nbytes
            if self._total:  # the bytes between tensors are written, too, and not in the total
                self._done = min(self._done, self._total)
            self(self._phase, self._done, self._total, name)

    def mention_torch(self) -> None:
        """Tell that torch is imported, unless it is there already; the phase goes on meanwhile."""
        if "torch" not in sys.modules:
            log.info("%s", IMPORTING)
            with self._lock:
                self(IMPORTING, 0, 0, "")


class ProgressLines:
    """Prints a line on stderr every few seconds, for a log file or a terminal without control."""

    def __init__(self) -> None:
        self._phase, self._start = "", 0.0
        self._printed_at = time.monotonic()

    def __call__(self, phase: str, done: int, total: int, name: str, /) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._start = phase, now
        if now - self._printed_at < EVERY_S:
            return
        self._printed_at = now
        try:
            sys.stderr.write(line(phase, done, total, name, now - self._start) + "\n")
            sys.stderr.flush()
        except OSError:
            pass  # nobody reads it; the run goes on

    def close(self) -> None:
        """Do nothing: a line stays."""


def line(phase: str, done: int, total: int, name: str, seconds: float) -> str:
    """`copying  42%  1.0 GiB of 2.3 GiB  820.0 MiB/s  1 s left  model.norm.weight`"""
    parts = [phase]
    if total:
        rate = done / seconds if seconds > 0 else 0.0
        parts += [f"{100 * done // total}%", f"{human(done)} of {human(total)}"]
        if rate:
            parts += [f"{human(int(rate))}/s", f"{(total - done) / rate:.0f} s left"]
    return "  ".join([*parts, one_line(name)]).rstrip()


def _with_phase(told: Callable[..., Any]) -> Progress:
    """Return the function; one of bytes and a key, as before 0.2, is told only of bytes written."""
    if argument_checks.parameters_of(told) != 2:
        return told
    warnings.warn(
        "progress: a function of (nbytes, key) is deprecated, expected one of"
        " (phase, done, total, name): ckptmap.protocols.Progress",
        DeprecationWarning,
        stacklevel=4,
    )
    before = 0

    def told_of_bytes(phase: str, done: int, total: int, name: str, /) -> None:
        nonlocal before
        if phase in (COPYING, CONVERTING) and done:
            told(done - before, name)
            before = done

    return told_of_bytes
