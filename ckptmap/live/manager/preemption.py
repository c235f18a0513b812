"""A signal that ends a run soon: noted when it comes, and agreed on by all ranks at the next step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from ckptmap.core import argument_checks
from ckptmap.core.formatting import first_line
from ckptmap.errors import ArgumentError
from ckptmap.live.model.rank_group import RankGroup


class Preemption:
    """Signals that this process was sent, such as SIGTERM of Slurm or Kubernetes."""

    def __init__(self) -> None:
        self._came = False
        self._before: dict[int, Any] = {}

    @property
    def is_watched(self) -> bool:
        return bool(self._before)

    def watch(self, names: tuple[str, ...]) -> None:
        """Note these signals in place of what the process did at them. Call it in the main thread.

        Raises ArgumentError CKM516 for one that cannot be noted."""
        for name in names:
            argument_checks.choice("signal", name, [one.name for one in signal.Signals])
            number = signal.Signals[name]
            try:
                before = signal.signal(number, self._note)
            except (OSError, ValueError) as error:  # SIGKILL, or another thread
                raise ArgumentError(
                    "CKM516",
                    f"signal={name!r}: cannot be noted: {first_line(error)}",
                    "call it in the main thread, with a signal that can be caught, such as 'SIGTERM'",
                ) from error
            self._before.setdefault(number, before)

    def release(self) -> None:
        """Do at the signals what was done before."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def agreed(self, join: Callable[[], RankGroup]) -> bool:
        """Return whether any rank was sent a signal. Where they are watched, every rank calls it at the
        same steps: one collective of a few bytes."""
        return self.is_watched and any(join().all(self._came))
