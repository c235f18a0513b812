"""An error of a save in the background reaches somebody: `wait`, the next save, or the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch import nn

import ckptmap
from ckptmap.errors import DestinationError
from ckptmap.live.save.save_handle import settle_started


def failed(folder: Path, step: int) -> object:
    """Start a save over a checkpoint that is there, without overwrite=True, and return its handle."""
    ckptmap.save(folder, nn.Linear(2, 2), step=step, overwrite=True).wait()
    return ckptmap.save(folder, nn.Linear(2, 2), step=step)


def test_the_next_save_raises_what_nobody_has_seen(tmp_path: Path) -> None:
    failed(tmp_path / "a", 7)
    text = rf"in the background \(step 7, {tmp_path / 'a'}\), failed: .*exists"
    with pytest.raises(DestinationError, match=text) as caught:
        ckptmap.save(tmp_path / "b", nn.Linear(2, 2))
    assert "this save was not begun: call it again" in caught.value.hint
    assert not (tmp_path / "b").exists()
    ckptmap.save(tmp_path / "b", nn.Linear(2, 2)).wait()
    assert ckptmap.verify(tmp_path / "b").ok


def test_a_save_in_another_thread_at_the_start_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for what was started, and not for a thread that was not."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "ckptmap-save":
            settle_started()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    ckptmap.save(tmp_path / "a", nn.Linear(2, 2)).wait()
    assert ckptmap.verify(tmp_path / "a").ok


def test_what_wait_has_raised_is_not_raised_again(tmp_path: Path) -> None:
    handle = failed(tmp_path / "a", 7)
    with pytest.raises(DestinationError, match="exists"):
        handle.wait()  # type: ignore[attr-defined]
    assert repr(handle) == f"<SaveHandle step 7, {tmp_path / 'a'}: failed>"
    ckptmap.save(tmp_path / "b", nn.Linear(2, 2)).wait()


def test_the_end_of_the_process_warns_and_logs(tmp_path: Path) -> None:
    code = """
import logging, sys
from torch import nn
import ckptmap
logging.basicConfig(format="LOGGED %(name)s %(message)s")
ckptmap.save(sys.argv[1], nn.Linear(2, 2), step=3).wait()
ckptmap.save(sys.argv[1], nn.Linear(2, 2), step=4)
"""
    arguments = [sys.executable, "-c", code, str(tmp_path / "a")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0
    text = f"a save in the background failed (step 4, {tmp_path / 'a'}): "
    assert f"LOGGED ckptmap {text}" in done.stderr
    assert f"RuntimeWarning: ckptmap: {text}" in done.stderr
