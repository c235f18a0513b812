"""What a killed save leaves is removed by the next save in that directory."""

from __future__ import annotations

import signal
from pathlib import Path

from torch import nn

import ckptmap
from ckptmap.storage.locks import Lock
from ckptmap.storage.recover import lock_path
from tests.support.forked import run_code

KILLED = """
import os, signal, sys
from torch import nn
import ckptmap
from ckptmap.storage.publish import WorkDirectory
WorkDirectory.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""
SAVED = KILLED + "ckptmap.save(sys.argv[1], nn.Linear(2, 2), background=False)"
CONVERTED = KILLED + "ckptmap.convert(sys.argv[2], sys.argv[1], to='hf')"


def killed(code: str, *paths: Path) -> None:
    assert run_code(code, *paths) == -signal.SIGKILL


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*"))


def test_leftovers_of_dead_processes_go_and_work_that_can_be_continued_stays(
    tmp_path: Path,
) -> None:
    ckptmap.save(tmp_path / "step-1", nn.Linear(2, 2)).wait()
    killed(SAVED, tmp_path / "step-2")
    left = hidden(tmp_path)
    assert len(left) == 2 and all(".step-2.ckptmap-" in name for name in left)
    killed(CONVERTED, tmp_path / "converted", tmp_path / "step-1")
    kept = [name for name in hidden(tmp_path) if name not in left]
    assert any((tmp_path / name / "journal.jsonl").exists() for name in kept)

    held = Lock(lock_path(tmp_path / "step-2"), tmp_path / "step-2")  # of a process that is alive
    ckptmap.save(tmp_path / "step-3", nn.Linear(2, 2)).wait()
    assert set(left) <= set(hidden(tmp_path))
    held.release()

    (note,) = ckptmap.save(tmp_path / "step-4", nn.Linear(2, 2)).wait()
    assert ".step-2.ckptmap-" in note and "removed" in note
    assert hidden(tmp_path) == kept


LOCKED = """
import os, signal, sys
from torch import nn
import ckptmap
from ckptmap.storage import publish
publish.check_space = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
ckptmap.save(sys.argv[1], nn.Linear(2, 2), background=False)
"""


def test_a_lock_without_a_work_directory_goes_unless_its_process_lives(tmp_path: Path) -> None:
    killed(LOCKED, tmp_path / "step-1")
    held = Lock(lock_path(tmp_path / "step-2"), tmp_path / "step-2")
    assert hidden(tmp_path) == [".step-1.ckptmap-lock", ".step-2.ckptmap-lock"]
    ckptmap.save(tmp_path / "step-3", nn.Linear(2, 2)).wait()
    assert hidden(tmp_path) == [".step-2.ckptmap-lock"]
    held.release()
