"""What `install` gives back: it removes the hooks, and holds the reports of the last loads."""

from __future__ import annotations

from collections.abc import Callable

from ckptmap.live.model.load_report import LoadReport


class Handle:
    """What was installed; `remove()` takes it away, as leaving a `with` does. `reports` are those
    of the last load of the model and of the optimizer."""

    def __init__(self) -> None:
        self.reports: dict[str, LoadReport] = {}
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
