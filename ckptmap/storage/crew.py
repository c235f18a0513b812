"""Threads that help each other: one that has nothing left to do takes pieces of what another one does.

    thread 1   tensor a   tensor c  c3  c5                 c1 .. c6 are pieces of tensor c
    thread 2   tensor b   c2  c4  c6

A model has a few tensors that are larger than the rest, and the last of them would be filled by one thread while
all others wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future


class Crew:
    """Runs work in several threads of a pool at once.

    submit  gives the pool a call for a thread that has nothing to do; calls that were given before come first. It
            raises RuntimeError where the pool is about to end
    """

    def __init__(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        self._submit = submit

    def run(self, pieces: deque[int], work: Callable[[], None]) -> None:
        """Call `work` in this thread, and in others as they become free; return when every call has ended.

        Each call takes pieces from the left until there are none. Raises what one of them raises; the pieces that
        nobody has taken by then are dropped.
        """
        shift = _Shift(self._submit, pieces, work)
        shift.call_for_help()
        try:
            shift.work()
        finally:
            errors = shift.ended()
        if errors:
            raise errors[0]


class _Shift:
    """One run of a crew. Each helper calls for the next one, so that no more come than there is work for."""

    def __init__(
        self, submit: Callable[[Callable[[], None]], Future[None]], pieces: deque[int],
        work: Callable[[], None],
    ) -> None:  # fmt: skip
        self._submit, self._pieces, self._work = submit, pieces, work
        self._helpers: list[Future[None]] = []
        self._lock = threading.Lock()

    def call_for_help(self) -> None:
        with self._lock:
            if self._pieces:
                try:
                    self._helpers.append(self._submit(self._help))
                except RuntimeError:  # no thread is free any more
                    return

    def _help(self) -> None:
        if self._pieces:
            self.call_for_help()
            self.work()

    def work(self) -> None:
        try:
            self._work()
        except BaseException:
            self._pieces.clear()
            raise

    def ended(self) -> list[BaseException]:
        """Wait for all helpers that have begun; return their errors. The others never begin."""
        self._pieces.clear()
        errors: list[BaseException] = []
        while True:
            with self._lock:
                if not self._helpers:
                    return errors
                helper = self._helpers.pop()
            if not helper.cancel() and (error := helper.exception()) is not None:
                errors.append(error)
