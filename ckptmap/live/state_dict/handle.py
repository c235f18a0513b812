"""The handle that `install` returns: it removes the hooks, and keeps the reports of the last loads."""

from __future__ import annotations

from collections.abc import Callable

from ckptmap.live.model.load_report import LoadReport


class Handle:
    """Installed hooks. `remove()` removes them, and so does leaving a `with` block. `reports` has the
    report of the last load of the model and of the optimizer."""

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
