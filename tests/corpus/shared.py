"""Folders that one test process fills and all of them read: what is costly is made once a session."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.corpus.ranks import RanksError


class Shared:
    """`shared("corpus/world2", fill) -> Path`: the folder of that name, filled by whoever comes first.

    Test processes side by side (pytest-xdist) use one `Shared` folder: the others wait for the one
    that fills. Tests only read what is in it. Where ranks fail in `fill`, each who asks gets that
    failure, and nothing is started again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filled: set[str] = set()

    def __call__(self, name: str, fill: Callable[[Path], object]) -> Path:
        """Return the folder of that name, after `fill(folder)`, which may find no folder there yet."""
        folder = self._folder / name
        if name not in self._filled:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_name(f"{folder.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when a process is killed
                self._fill(folder, fill)
            self._filled.add(name)
        return folder

    def _fill(self, folder: Path, fill: Callable[[Path], object]) -> None:
        done, failed = (folder.with_name(f"{folder.name}.{end}") for end in ("done", "failed"))
        if failed.exists():
            raise RanksError(failed.read_text())
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # half filled by a killed process
            try:
                fill(folder)
            except RanksError as error:
                failed.write_text(str(error))
                raise
            done.touch()
