"""`CheckpointManager` where processes are killed, meet on one root, or go back, and where the disk is full."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.core.log import log
from ckptmap.errors import ArgumentError, CkptmapError
from ckptmap.live.manager import root_directory
from ckptmap.live.save import write_dcp
from ckptmap.operations.list_steps import list_steps
from tests.corpus.ranks import run_ranks
from tests.support.resume_model import net


def model(value: float) -> nn.Module:
    made = nn.Linear(2, 2)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def restored(root: Path, **rules: Any) -> int | None:
    """Return the step that is restored, after a look at its values."""
    found = model(0)
    report = ckptmap.CheckpointManager(root, **rules).restore(found)
    if report is None:
        return None
    assert (found.weight == report.step).all()
    return report.step


def in_child(run: Callable[[], object]) -> int:
    """Run in a forked process; return its exit code, below zero for the signal that ended it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        run()
        code = 0
    finally:
        os._exit(code)


def killed(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the manager logs as errors."""
    found: list[str] = []
    monkeypatch.setattr(log, "error", lambda text, *args: found.append(text % args))
    return found


# ------------------------------------------------------------------------------- killed

POINTS: dict[str, tuple[object, str, int]] = {
    "while its file is written": (write_dcp, "_write_file", 2),
    "before its manifest is there": (write_dcp, "_finish", 2),
    "before the pointer moves": (root_directory, "point_to", 3),
    "with a new pointer written": (root_directory.os, "replace", 3),
    "with an old checkpoint renamed": (root_directory, "_unlink_all", 3),
}
"""Point -> (where, what is replaced by a kill in the third save, the newest step by then)."""


@pytest.mark.parametrize("point", POINTS)
def test_killed_in_the_third_save(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest complete checkpoint is restored, and the next save leaves nothing of the killed one."""
    where, name, newest = POINTS[point]

    def run() -> None:
        manager = ckptmap.CheckpointManager(tmp_path, keep=2)
        for step in (1, 2, 3):
            if step == 3:
                monkeypatch.setattr(where, name, killed)
            manager.save(step, model(step))
            manager.wait()

    assert in_child(run) == -signal.SIGKILL
    assert restored(tmp_path) == newest
    assert ckptmap.CheckpointManager(tmp_path).latest() == tmp_path / f"step-{newest}"
    for old in tmp_path.glob(".latest*"):
        os.utime(old, (0, 0))  # one that is new may be another process's
    with ckptmap.CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(4, model(4))
    assert names(tmp_path) == ["latest", "step-4"] and restored(tmp_path) == 4


# ------------------------------------------------------------------------------- one root


def test_two_processes_on_one_root(tmp_path: Path) -> None:
    """Each removes what the other saved before; in the end the newest is whole, and nothing is left over."""

    def run(first: int) -> None:
        with ckptmap.CheckpointManager(tmp_path, keep=1) as manager:
            for step in range(first, 12, 2):
                manager.save(step, model(step))
                manager.wait()

    children = []
    for first in (0, 1):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                run(first)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0, 0]
    left = restored(tmp_path)
    assert left in (10, 11) and not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the manager logs as warnings."""
    found: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *args: found.append(text % args))
    return found


def test_an_earlier_step_that_is_saved_again_is_the_newest(
    tmp_path: Path, warned: list[str]
) -> None:
    """As a run that goes back by itself would want it; once it is said. Without a pointer, as in the
    directories of torchtitan, the highest step is the newest."""
    with ckptmap.CheckpointManager(tmp_path) as manager:
        for step in (10, 20, 10, 12):
            manager.save(step, model(step))
    assert manager.latest() == tmp_path / "step-12" and restored(tmp_path) == 12
    (said,) = warned
    assert "step 10 is saved after step 20 and is the newest from now on" in said
    assert str(list_steps(tmp_path)).endswith("3 checkpoints; the newest is of step 12")
    assert list_steps(tmp_path).to_json()["newest"] == "step-12"
    (tmp_path / "latest").unlink()
    assert manager.latest() == tmp_path / "step-20" and restored(tmp_path) == 20


def test_a_step_whose_manifest_was_deleted(tmp_path: Path, warned: list[str]) -> None:
    """It is restored with a warning; with `exact` it is refused, for nothing proves what it holds."""
    with ckptmap.CheckpointManager(tmp_path) as manager:
        manager.save(1, model(1))
        manager.save(2, model(2))
    (tmp_path / "step-2" / "ckptmap.manifest.json").unlink()
    assert restored(tmp_path) == 2
    assert [text for text in warned if "step-2: its ckptmap.manifest.json is missing" in text]
    with pytest.raises(CkptmapError, match=r"manifest\.json is missing"):
        ckptmap.CheckpointManager(tmp_path).restore(model(0), exact=True)


def test_a_run_that_goes_back(tmp_path: Path, warned: list[str]) -> None:
    """The newest is what was saved last, whatever its number, also where the pointer was not moved."""
    with ckptmap.CheckpointManager(tmp_path, keep=3) as manager:
        for step in (10, 20, 30):
            manager.save(step, model(step))
    with ckptmap.CheckpointManager(tmp_path, keep=3) as manager:
        report = manager.restore(model(0), step=10)
        assert report is not None and report.step == 10
        manager.save(15, model(15))
        manager.wait()
        assert names(tmp_path) == ["latest", "step-15", "step-20", "step-30"]
        assert manager.latest() == tmp_path / "step-15" and restored(tmp_path) == 15
        manager.save(25, model(25))
        manager.wait()
        root_directory.point_to(tmp_path, "step-15")  # as if killed before it was moved
        assert restored(tmp_path) == 25
        manager.save(26, model(26))
    assert names(tmp_path) == ["latest", "step-15", "step-25", "step-26"]
    assert not warned, "restore(step=10) has said so"


@pytest.mark.parametrize("text", [b"../elsewhere\n", b"\xff\xfe", b"", b"step-99\n", b"x" * 10_000])
def test_a_pointer_that_names_nothing(text: bytes, tmp_path: Path) -> None:
    with ckptmap.CheckpointManager(tmp_path) as manager:
        manager.save(1, model(1))
        manager.save(2, model(2))
    (tmp_path / "latest").write_bytes(text)
    assert restored(tmp_path) == 2


@pytest.mark.parametrize("name", ["step-1", "step-1/.metadata"])
def test_a_root_that_is_none_does_not_begin_anew(name: str, tmp_path: Path) -> None:
    """The path of a step, or of a file, is given in place of that of the run."""
    with ckptmap.CheckpointManager(tmp_path) as manager:
        manager.save(1, model(1))
    what = "a checkpoint itself" if name == "step-1" else "a file"
    text = rf"{name}: is {what}, expected a directory of checkpoints; .*{tmp_path}"
    for step in ("latest", "best", 1):
        with pytest.raises(CkptmapError, match=text):
            ckptmap.CheckpointManager(tmp_path / name).restore(model(0), step=step)
    assert ckptmap.CheckpointManager(tmp_path / "new").restore(model(0)) is None


def test_links(tmp_path: Path) -> None:
    """A root behind a link is one; a step that is a link is read, and never removed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    ckptmap.save(
        tmp_path / "elsewhere", model(1), step=1, extra={"manager": {"metrics": {}}}
    ).wait()
    (tmp_path / "real" / "step-1").symlink_to(tmp_path / "elsewhere")
    with ckptmap.CheckpointManager(tmp_path / "root", keep=1) as manager:
        assert restored(tmp_path / "root") == 1
        manager.save(2, model(2))
        manager.save(3, model(3))
    assert names(tmp_path / "real") == ["latest", "step-1", "step-3"]
    assert restored(tmp_path / "root") == 3 and (tmp_path / "elsewhere").is_dir()


def test_a_pointer_that_cannot_be_written(tmp_path: Path, logged: list[str]) -> None:
    """Something else has its name: it stays, an error is logged, and old checkpoints go all the same."""
    (tmp_path / "latest" / "inside").mkdir(parents=True)
    with ckptmap.CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(1, model(1))
        manager.save(2, model(2))
    assert [name for name in names(tmp_path) if name[0] != "."] == ["latest", "step-2"]
    assert "latest could not be written" in "".join(logged) and restored(tmp_path) == 2


def test_a_step_whose_checkpoint_is_damaged_is_saved_again(tmp_path: Path) -> None:
    """The damaged one is moved aside, as often as it happens; what is not all a save's own is left alone."""
    for broken in range(2):
        with ckptmap.CheckpointManager(tmp_path) as manager:
            report = manager.restore(model(0))
            assert (report is None) == (not broken)
            for step in (1, 2):
                manager.save(step, model(step))
        (tmp_path / "step-2" / ".metadata").write_bytes(b"junk")
    assert names(tmp_path) == ["latest", "step-1", "step-2", "step-2.damaged"]
    assert restored(tmp_path) == 1
    (tmp_path / "step-2" / "notes").write_text("of the user")
    manager = ckptmap.CheckpointManager(tmp_path)
    manager.save(2, model(2))
    with pytest.raises(CkptmapError, match="step-2: exists"):
        manager.wait()
    manager.close()  # the error was raised, once
    assert names(tmp_path) == ["latest", "step-1", "step-2", "step-2.damaged"]


def test_files_of_others_are_not_removed(tmp_path: Path) -> None:
    """Neither by `keep`, nor where a pointer or a name leads to them; the rest goes. A clock that another
    machine has set wrong removes nothing that is new."""
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "thesis.txt").write_text("of the user")
    (tmp_path / "latest").write_text("step-7\n")
    skewed = tmp_path / ".latest.ckptmap-new-999999"
    skewed.touch()
    os.utime(skewed, (4e9, 4e9))
    with ckptmap.CheckpointManager(tmp_path, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, model(step))
            manager.wait()
            if step == 1:
                (tmp_path / "step-1" / "thesis.txt").write_text("of the user")
    assert names(tmp_path) == ["latest", "step-1", "step-3", "step-7"]
    assert names(tmp_path / "step-7") == ["thesis.txt"] and restored(tmp_path) == 3


# ------------------------------------------------------------------------------- full disks


@contextlib.contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond `nbytes`, in place of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(tmp_path: Path) -> None:
    """The save fails, what was there stays, and later saves go on."""
    manager = ckptmap.CheckpointManager(tmp_path, keep=1)
    manager.save(1, model(1))
    manager.wait()
    with at_most(4096):
        manager.save(2, model(2))
        with pytest.raises(CkptmapError):
            manager.wait()
    assert restored(tmp_path) == 1 and (tmp_path / "latest").read_text() == "step-1\n"
    manager.save(3, model(3))
    manager.wait()
    assert names(tmp_path) == ["latest", "step-3"]


def test_an_error_that_the_next_save_has_raised_is_not_raised_again(tmp_path: Path) -> None:
    """Neither by `close`, where a caller has caught it."""
    (tmp_path / "step-1" / "of somebody").mkdir(parents=True)
    with ckptmap.CheckpointManager(tmp_path) as manager:
        manager.save(1, model(1))
        with pytest.raises(CkptmapError, match=r"the save before.*step-1: exists"):
            manager.save(2, model(2))
    assert not (tmp_path / "step-2").exists()


def test_a_signal_after_a_save_that_failed(tmp_path: Path, logged: list[str]) -> None:
    """The last save is not lost for the error of the one before, which is logged."""
    manager = ckptmap.CheckpointManager(tmp_path)
    manager.on_preemption("SIGUSR1", exit_code=9)
    try:
        (tmp_path / "step-1" / "of somebody").mkdir(parents=True)
        manager.save(1, model(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit) as end:
            manager.save(2, model(2))
    finally:
        manager._preemption.release()
    assert end.value.code == 9 and restored(tmp_path) == 2
    assert "the save before failed" in "".join(logged) and "step-1: exists" in "".join(logged)


def test_a_signal_during_a_save_in_the_background(tmp_path: Path) -> None:
    """It ends first; the step of the signal is saved after it."""
    manager = ckptmap.CheckpointManager(tmp_path, bandwidth="200KiB")
    manager.on_preemption("SIGUSR1", exit_code=9)
    try:
        handle = manager.save(1, model(1))
        assert handle is not None and not handle.done
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit):
            manager.save(2, model(2))
    finally:
        manager._preemption.release()
    assert manager.steps() == [1, 2]


# ------------------------------------------------------------------------------- time


def test_blocked_time_and_bandwidth(tmp_path: Path) -> None:
    """140 KB at 280 KiB/s take half a second, for which training is not held; a save that it waits for
    has no limit."""
    manager = ckptmap.CheckpointManager(tmp_path, bandwidth="280KiB")
    begun = time.perf_counter()
    handle = manager.save(1, model(1))
    assert handle is not None
    held = time.perf_counter() - begun
    manager.wait()
    took = time.perf_counter() - begun
    nbytes = sum(file.stat().st_size for file in (tmp_path / "step-1").iterdir())
    assert took > 0.6 * nbytes / (280 << 10)
    assert handle.blocked_s <= manager.blocked_s[1] <= held < took
    manager.background = False
    begun = time.perf_counter()
    handle = manager.save(2, model(2))
    assert handle is not None and handle.blocked_s > 0.4 * (time.perf_counter() - begun)
    with pytest.raises(ArgumentError, match="bandwidth='fast', expected a size"):
        ckptmap.CheckpointManager(tmp_path, bandwidth="fast")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("no tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_small_disk_and_a_root_that_cannot_be_written(small_disk: Path) -> None:
    """A save that does not fit is refused, smaller ones go on; a read-only root is restored from, and a
    save into it says so."""
    root = small_disk / "runs"
    with ckptmap.CheckpointManager(root, keep=1) as manager:
        manager.save(1, model(1))
        manager.wait()
        manager.save(2, nn.Linear(600, 600))
        with pytest.raises(CkptmapError, match=r"needs .* free"):
            manager.wait()
        assert restored(root) == 1
        manager.save(3, model(3))
    assert names(root) == ["latest", "step-3"]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert restored(root) == 3
    manager = ckptmap.CheckpointManager(root)
    manager.save(4, model(4))
    with pytest.raises(CkptmapError, match="runs"):
        manager.wait()
    assert restored(root) == 3


# ------------------------------------------------------------------------------- ranks

RANK_FAULTS = {
    "dies_in_retention": {"told-1", "told-2"},
    "dies_in_restore": {"told-0", "told-2"},
    "full_disk": {"told-0", "told-1", "told-2"},
}
"""Scenario of tests/ranks/manager_faults.py -> the ranks that raise one error."""


@pytest.mark.parametrize("scenario", RANK_FAULTS)
def test_one_rank_of_three(scenario: str, tmp_path: Path) -> None:
    """Afterwards the newest checkpoint is whole, and the next save leaves nothing of the fault."""
    run_ranks("tests.ranks.manager_faults", 3, [scenario, str(tmp_path)], timeout=120)
    assert {path.name for path in tmp_path.glob("told-*")} == RANK_FAULTS[scenario]
    root = tmp_path / "root"
    again = net(1)
    report = ckptmap.CheckpointManager(root).restore(again, torch.optim.AdamW(again.parameters()))
    assert report is not None and report.step == 2 and not report.skipped
    with ckptmap.CheckpointManager(root, keep=1) as manager:
        manager.save(9, again)
    assert names(root) == ["latest", "step-9"]
