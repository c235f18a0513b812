"""A run that is killed leaves the destination as it was; the same command continues it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import CkptmapError, DestinationError
from ckptmap.operations import overwrite as check_overwrite
from tests.support.files import leftovers, tree
from tests.support.forked import Process, forked, run_code, run_forked


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MB: long enough for a signal to find the run at any stage."""
    file = tmp_path_factory.mktemp("restart") / "src.safetensors"
    torch.manual_seed(3)
    save_file({f"l.{i}.weight": torch.randn(512, 1024) for i in range(12)}, file)
    return file


def command(source: Path, dst: Path, to: str, *more: str) -> list[str]:
    return ["ckptmap", "convert", str(source), str(dst), "--to", to, "--quiet", *more]


def journaled(folder: Path) -> int:
    """Units that the run in this folder has written down."""
    try:
        return sum(file.read_bytes().count(b"\n") for file in folder.glob(".*/journal.jsonl"))
    except FileNotFoundError:
        return 0


def killed_after(units: int, process: Process, folder: Path) -> bool:
    """SIGKILL once `units` more are journaled; False where the run was done before."""
    wanted = journaled(folder) + units
    while journaled(folder) < wanted and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    return process.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.parametrize("to", ["full", "fsdp2-nf4"])
def test_killed_at_any_point_and_continued(to: str, source: Path, tmp_path: Path) -> None:
    options = ["--world-size", "2"] if to.startswith("fsdp") else []
    whole, work = tmp_path / "whole", tmp_path / "work"
    ckptmap.convert(source, whole, to=to, **({"world_size": 2} if options else {}))
    expected = tree(whole)
    work.mkdir()
    kills = 0
    for units in (0, 1, 2, 4, 1, 3):
        line = [*command(source, work / "out", to, *options), "--threads", "1"]
        line += ["--no-sync"] * (units % 2)  # either continues what the other began
        with forked(*line) as process:
            kills += killed_after(units, process, work)
        if (work / "out").exists():
            assert tree(work / "out") == expected
    assert kills >= 3
    done = run_forked(*line, check=True)
    assert done.stdout
    assert tree(work / "out") == expected
    assert leftovers(work) == []


def test_old_destination_stays_until_the_new_one_is_whole(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    ckptmap.convert(source, dst, to="hf", include=("l.0.*",))
    old = tree(dst)
    fresh = tmp_path / "fresh"
    run_forked(*command(source, fresh, "hf-bf16"), check=True)
    new = tree(fresh)
    rng = random.Random(5)
    for _ in range(6):
        with forked(*command(source, dst, "hf-bf16", "--overwrite")) as process:
            killed_after(rng.randrange(8), process, tmp_path)
        assert tree(dst) in (old, new)
    run_forked(*command(source, dst, "hf-bf16", "--overwrite"), check=True)
    assert tree(dst) == new
    assert leftovers(tmp_path) == []


def test_interrupt_says_how_to_continue(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    line = [sys.executable, "-m", *command(source, dst, "full-nf4", "--threads", "1")]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob(".out.ckptmap-*/journal.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "same command" in stderr
    assert "Traceback" not in stderr
    assert not dst.exists()
    run_forked(*command(source, dst, "full-nf4"), check=True)
    assert ckptmap.verify(dst, against=source).ok


def test_finished_run_repeated_is_no_error(source: Path, tmp_path: Path) -> None:
    ckptmap.convert(source, tmp_path / "out.pt", to="full")
    before = os.stat(tmp_path / "out.pt")
    report = ckptmap.convert(source, tmp_path / "out.pt", to="full")
    assert "was complete already" in report.notes
    after = os.stat(tmp_path / "out.pt")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(ckptmap.CkptmapError, match="exists"):
        ckptmap.convert(source, tmp_path / "out.pt", to="full-bf16")


def test_overwrite_never_replaces_what_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(ckptmap.CkptmapError, match="holds no checkpoint"):
        ckptmap.convert(source, tmp_path / "thesis", to="hf", overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


def test_overwrite_replaces_what_lies_there_not_what_lies_inside(
    source: Path, tmp_path: Path
) -> None:
    """A directory with one checkpoint in it opens well, and is none: its other content is kept."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    ckptmap.convert(source, tmp_path / "thesis" / "model", to="hf")
    for overwrite, says in ((False, "exists"), (True, "with a checkpoint inside: .*model")):
        with pytest.raises(ckptmap.CkptmapError, match=says):
            ckptmap.convert(source, tmp_path / "thesis", to="hf", overwrite=overwrite)
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


def test_overwrite_keeps_other_checkpoints_and_files_of_others(
    source: Path, tmp_path: Path
) -> None:
    """What a Trainer leaves: the model, and earlier checkpoints below it."""
    ckptmap.convert(source, tmp_path / "out", to="hf")
    ckptmap.convert(source, tmp_path / "out" / "checkpoint-500", to="fsdp2")
    (tmp_path / "notes.txt").write_text("years of work")
    with pytest.raises(ckptmap.CkptmapError, match="other checkpoints beside its own: checkpoint-"):
        ckptmap.convert(source, tmp_path / "out", to="hf-bf16", overwrite=True)
    assert ckptmap.verify(tmp_path / "out" / "checkpoint-500").ok
    shutil.rmtree(tmp_path / "out" / "checkpoint-500")
    config = '{"model_type": "llama"}'
    for name in ("notes.txt", "runs/events.out", "README.md", "config.json", ".cache/hub/x"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(config)
    says = r"do not belong to its checkpoint: notes\.txt, runs/events\.out; --overwrite would delete them"
    with pytest.raises(ckptmap.CkptmapError, match=says):
        ckptmap.convert(source, tmp_path / "out", to="hf-bf16", overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == config
    (tmp_path / "out" / "notes.txt").unlink()
    shutil.rmtree(tmp_path / "out" / "runs")
    ckptmap.convert(source, tmp_path / "out", to="hf-bf16", overwrite=True)
    assert not (tmp_path / "out" / "README.md").exists()
    with pytest.raises(ckptmap.CkptmapError, match="is a file that holds no checkpoint"):
        ckptmap.convert(source, tmp_path / "notes.txt", to="full", overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "years of work"


@pytest.mark.parametrize("to", ["full", "fsdp2"])
def test_what_a_run_left_that_was_killed_after_its_rename_is_removed(
    to: str, tmp_path: Path
) -> None:
    """With --overwrite that is the whole of what was there before."""
    for name in ("old", "new"):
        save_file({"w": torch.ones(64)}, tmp_path / name, {"is": name})
    dst = tmp_path / "out"
    ckptmap.convert(tmp_path / "old", dst, to=to)
    killed = (
        "import os, ckptmap; from ckptmap.storage import publish as publish\n"
        "publish.discard = lambda *_: os._exit(9)\n"
        f"ckptmap.convert({str(tmp_path / 'new')!r}, {str(dst)!r}, to={to!r}, overwrite=True)"
    )
    assert run_code(killed) == 9
    assert leftovers(tmp_path) != []
    report = ckptmap.convert(tmp_path / "new", dst, to=to, overwrite=True)
    assert "was complete already" in report.notes and "removed" in report.notes[-1]
    assert leftovers(tmp_path) == []
    assert ckptmap.verify(dst, against=tmp_path / "new").ok


@pytest.mark.parametrize("to", ["full", "fsdp2"])
@pytest.mark.parametrize("kept", ["journal.jsonl", "out", ""])
def test_what_a_power_cut_leaves_of_a_removed_work_directory_is_removed(
    to: str, kept: str, tmp_path: Path
) -> None:
    """The destination is complete, so nothing in the directory can be needed."""
    save_file({"w": torch.ones(64)}, tmp_path / "src")
    dst = tmp_path / "out"
    digest = ckptmap.plan(tmp_path / "src", to).digest
    ckptmap.convert(tmp_path / "src", dst, to=to)
    work = tmp_path / f".out.ckptmap-{digest[:12]}"
    work.mkdir()
    if kept == "out":
        (work / kept).mkdir()
        (work / kept / "__9_0.distcp").write_bytes(b"of the replaced output")
    elif kept:
        (work / kept).write_text("{}")
    report = ckptmap.convert(tmp_path / "src", dst, to=to)
    assert "was complete already" in report.notes and "removed" in report.notes[-1]
    assert leftovers(tmp_path) == []
    assert ckptmap.verify(dst, against=tmp_path / "src").ok


def test_a_work_directory_that_is_being_removed_is_swept_where_the_destination_exists(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(4, 4)
    ckptmap.save(tmp_path / "out", model, background=False).wait()
    (tmp_path / ".out.ckptmap-aaaaaaaaaaaa.done" / "out").mkdir(parents=True)
    with pytest.raises(DestinationError, match="exists"):
        ckptmap.save(tmp_path / "out", model, background=False).wait()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("at", ["", "sub"])
def test_an_old_destination_that_cannot_be_listed_is_refused(
    number: int, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not listed could be a file of the user, which --overwrite would delete."""
    save_file({"w": torch.ones(64)}, tmp_path / "src")
    dst = tmp_path / "out"
    ckptmap.convert(tmp_path / "src", dst, to="hf")
    (dst / "sub").mkdir()
    (dst / "sub" / "notes.txt").write_text("years of work")

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(path: str | Path = ".") -> object:
            if str(path) == str(dst / at) and walking:
                raise OSError(number, os.strerror(number), str(path))
            return real(path)

        return call

    walking: list[bool] = []
    opened = check_overwrite.open
    if at:  # only what --overwrite itself lists fails
        monkeypatch.setattr(
            check_overwrite, "open", lambda path: walking.append(True) or opened(path)
        )
    else:
        walking.append(True)
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    with pytest.raises(ckptmap.CkptmapError, match=os.strerror(number)) as caught:
        ckptmap.convert(tmp_path / "src", dst, to="fsdp2", overwrite=True)
    assert caught.value.code == ("CKM313" if number == errno.EMFILE else "CKM304")
    monkeypatch.undo()
    assert (dst / "sub" / "notes.txt").exists()
    assert leftovers(tmp_path) == []


def test_a_destination_that_no_filesystem_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "src")
    for name in ("x" * 256, "x" * 250, "x/" * 2500 + "y"):
        with pytest.raises(DestinationError, match="cannot be written") as caught:
            ckptmap.convert(tmp_path / "src", tmp_path / name, to="full")
        assert caught.value.code == "CKM304"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(DestinationError, match="the working directory, and that is gone"):
        ckptmap.convert(tmp_path / "src", "out", to="full")
    ckptmap.convert(tmp_path / "src", tmp_path / "out", to="full")


@pytest.mark.parametrize("problem", ["damage", "nan"])
def test_a_refused_run_leaves_nothing_behind(problem: str, tmp_path: Path) -> None:
    """No run could continue it: the same command meets the same damage, or the same values, again."""
    folder, path = tmp_path / "out", tmp_path / "x.pt"
    folder.mkdir()
    weights = {f"{i}.weight": torch.ones(256, 256) for i in range(8)}
    if problem == "nan":
        weights["7.weight"][200, 3] = torch.nan
    torch.save(weights, path)
    if problem == "damage":
        content = bytearray(path.read_bytes())
        content[content.index(torch.ones(1).numpy().tobytes() * 512) + 1024] ^= 1
        path.write_bytes(content)
    to = "full-nf4" if problem == "nan" else "hf"
    with pytest.raises(CkptmapError) as caught:
        ckptmap.convert(path, folder / "out", to, threads=1)
    assert caught.value.code == {"damage": "CKM105", "nan": "CKM309"}[problem]
    assert list(folder.iterdir()) == []
