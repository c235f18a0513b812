"""An error of a save in the background reaches somebody: `wait`, the next save, or the end of the process."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ckptmap
from ckptmap.errors import CkptmapError, DestinationError, RunError, SourceError
from ckptmap.live.save import save as save_module
from ckptmap.live.save import save_handle
from ckptmap.live.save.save_handle import SaveHandle, settle_started
from ckptmap.storage.recover import lock_path
from tests.corpus.ranks import run_ranks


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


def test_the_thread_that_writes_begins_once_the_call_has_returned(tmp_path: Path) -> None:
    """Else the thread that trains would wait for Python's lock, which the other one has just got."""
    began: list[bool] = []

    def run() -> tuple[str, ...]:
        began.append(hasattr(save_handle._started[-1], "blocked_s"))
        return ()

    for number in range(20):
        SaveHandle(tmp_path, number, run, background=True).wait()
    assert began == [True] * 20


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


@pytest.mark.parametrize("background", [True, False])
def test_a_handle_that_is_kept_holds_no_weights(background: bool, tmp_path: Path) -> None:
    """A manager keeps its last: the memory of a model that is gone must not stay with it."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    storages = [model.weight.data, optimizer.state[model.weight]["exp_avg"]]
    watched = [StorageWeakRef(tensor.untyped_storage()) for tensor in storages]
    handle = ckptmap.save(tmp_path / "out", model, optimizer, background=background)
    assert handle.wait() == ()
    del model, optimizer, storages
    gc.collect()
    assert handle.done and [one.expired() for one in watched] == [True, True]


def test_a_handle_of_a_failed_save_holds_no_weights(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    model = nn.Linear(64, 64)
    watched = StorageWeakRef(model.weight.data.untyped_storage())
    handle = ckptmap.save(tmp_path / "out", model)
    with pytest.raises(CkptmapError):
        handle.wait()
    del model
    gc.collect()
    assert watched.expired() and "failed" in repr(handle)


def test_the_working_directory_may_change_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths are those of the call, of a manager those of its constructor."""
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    model, hold = nn.Linear(2, 2), threading.Event()
    work = SaveHandle._work

    def waits(handle: SaveHandle) -> None:
        hold.wait(60)
        work(handle)

    monkeypatch.setattr(SaveHandle, "_work", waits)
    manager = ckptmap.CheckpointManager("runs")
    handle = ckptmap.save("out", model)
    monkeypatch.chdir(tmp_path / "sub")
    hold.set()
    handle.wait()
    manager.save(1, model)
    manager.close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "runs", "sub"]
    assert not [*(tmp_path / "sub").iterdir()] and manager.latest() == tmp_path / "runs" / "step-1"


def test_a_group_that_is_destroyed_before_the_end(tmp_path: Path) -> None:
    """It was a ValueError of torch, about a group that it does not know."""
    run_ranks("tests.ranks.destroyed_group", 2, [str(tmp_path)], timeout=120)


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let saves wait for the event before they write their files."""
    go = threading.Event()

    def write(*args: object, **kwargs: object) -> object:
        assert go.wait(60)
        return own_write(*args, **kwargs)  # type: ignore[arg-type]

    own_write = save_module.write
    monkeypatch.setattr(save_module, "write", write)
    return go


def test_what_is_still_being_saved_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is not there yet, and its lock neither: the thread has hardly begun."""
    go = held_up(monkeypatch)
    handle = ckptmap.save(tmp_path / "a", nn.Linear(2, 2))
    for read in (ckptmap.open, ckptmap.verify):
        with pytest.raises(SourceError, match="is being saved in the background") as caught:
            read(tmp_path / "a")
        assert "call wait() of the handle" in caught.value.hint
    with pytest.raises(SourceError, match="no such file"):
        ckptmap.open(tmp_path / "b")
    go.set()
    handle.wait()
    assert ckptmap.verify(tmp_path / "a").ok
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(SourceError, match="no such file"):
        ckptmap.open(tmp_path / "a")


def test_load_waits_for_the_save_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = held_up(monkeypatch)
    model, again = nn.Linear(2, 2), nn.Linear(2, 2)
    ckptmap.save(tmp_path / "a", model)
    timer = threading.Timer(0.2, go.set)
    timer.start()
    ckptmap.load(tmp_path / "a", again)
    timer.join()
    assert torch.equal(again.weight, model.weight)


def test_load_raises_the_error_of_a_save_that_left_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*args: object) -> object:
        raise RunError("CKM306", "write failed", "free some space and save again")

    monkeypatch.setattr(save_module, "write", write)
    ckptmap.save(tmp_path / "a", nn.Linear(2, 2))
    with pytest.raises(RunError, match="write failed"):
        ckptmap.load(tmp_path / "a", nn.Linear(2, 2))
    with pytest.raises(SourceError, match="no such file"):  # it was raised once
        ckptmap.load(tmp_path / "a", nn.Linear(2, 2))


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_another_process_writes_is_said_to_be(tmp_path: Path, is_gone: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as other:
        owner = {"host": socket.gethostname(), "pid": other.pid, "start": 0, "token": "a"}
        lock_path(tmp_path / "a").write_text(json.dumps(owner))
        if is_gone:
            other.communicate(b"\n")
        text = "no such file" if is_gone else f"is being written by pid {other.pid} on host"
        with pytest.raises(SourceError, match=text) as caught:
            ckptmap.open(tmp_path / "a")
        assert is_gone or "when that process has finished" in caught.value.hint
