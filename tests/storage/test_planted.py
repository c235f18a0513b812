"""What others put into a work directory is refused by name: nothing is followed or waited for."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import CkptmapError, DestinationError, RunError
from ckptmap.storage import own_files
from ckptmap.storage.journal import Journal
from ckptmap.storage.own_files import kind_of, odd_file, read_plain, write_new
from ckptmap.storage.publish import WorkDirectory

A = "a" * 16
PRECIOUS = "years of work"


def symlink(place: Path, target: Path) -> None:
    place.symlink_to(target)


def hard_link(place: Path, target: Path) -> None:
    os.link(target, place)


def fifo(place: Path, target: Path) -> None:
    os.mkfifo(place)


Plant = Callable[[Path, Path], None]
PLANTS = {symlink: "is a symbolic link", hard_link: "has 2 hard links", fifo: "is a FIFO"}


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    (tmp_path / "theirs").mkdir()
    file = tmp_path / "theirs" / "thesis"
    file.write_text(PRECIOUS)
    return file


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "out"


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize(
    "name",
    ["journal.jsonl", "journal.jsonl.new", "journal-1.jsonl", "publishing", "out/model", "x"],
)
def test_in_the_work_directory(dst: Path, precious: Path, plant: Plant, name: str) -> None:
    work = dst.with_name(f".out.ckptmap-{A[:12]}")
    (work / "out").mkdir(parents=True)
    plant(work / name, precious)
    with pytest.raises(DestinationError, match=f"{name}: {PLANTS[plant]}") as caught:
        WorkDirectory.open(dst, A, one_file=False, overwrite=False)
    assert caught.value.code == "CKM304" and "rm -r" in caught.value.hint
    assert precious.read_text() == PRECIOUS
    assert not dst.exists() and not dst.with_name(".out.ckptmap-lock").exists()


@pytest.mark.parametrize("name", ["", "out"])
def test_a_link_in_place_of_a_directory(dst: Path, precious: Path, name: str) -> None:
    work = dst.with_name(f".out.ckptmap-{A[:12]}")
    if name:
        work.mkdir()
    (work / name).symlink_to(precious.parent)
    with pytest.raises(DestinationError, match=r"is a symbolic link, expected a directory"):
        WorkDirectory.open(dst, A, one_file=False, overwrite=False)
    assert [file.name for file in precious.parent.iterdir()] == ["thesis"]


def test_a_file_in_place_of_a_directory(dst: Path) -> None:
    dst.with_name(f".out.ckptmap-{A[:12]}").write_text("x")
    with pytest.raises(DestinationError, match=r"is a regular file, expected a directory"):
        WorkDirectory.open(dst, A, one_file=False, overwrite=False)


@pytest.mark.parametrize("plant", [symlink, fifo])
def test_in_place_of_the_lock(dst: Path, precious: Path, plant: Plant) -> None:
    plant(dst.with_name(".out.ckptmap-lock"), precious)
    with pytest.raises(DestinationError, match=rf"out\.ckptmap-lock: {PLANTS[plant]}"):
        WorkDirectory.open(dst, A, one_file=False, overwrite=False)
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.new", "journal-3.jsonl"])
def test_where_a_rank_opens_its_journal(
    tmp_path: Path, precious: Path, plant: Plant, name: str
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    plant(folder / name, precious)
    with pytest.raises(DestinationError, match=f"{name}: {PLANTS[plant]}"):
        Journal(folder / "journal.jsonl", A)
    assert precious.read_text() == PRECIOUS


def test_a_directory_of_another_user(dst: Path) -> None:
    work = dst.with_name(f".out.ckptmap-{A[:12]}")
    work.mkdir()
    uid = work.stat().st_uid
    with pytest.raises(DestinationError, match=f"belongs to user {uid}, expected {uid + 1}"):
        own_files.own_directory(work, uid + 1)
    other = work.with_name(".out.ckptmap-bbbbbbbbbbbb")
    other.symlink_to(work)
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False) as opened:
        assert any("left alone; it is a symbolic link" in note for note in opened.notes)
    assert other.is_symlink()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (stat.S_IFCHR, "is a device"),
        (stat.S_IFBLK, "is a device"),
        (stat.S_IFSOCK, "is a socket"),
        (stat.S_IFIFO, "is a FIFO"),
        (stat.S_IFLNK, "is a symbolic link"),
        (stat.S_IFDIR, "is a directory"),
        (0, "is of an unknown kind"),
    ],
)
def test_kinds_that_are_never_opened(mode: int, kind: str) -> None:
    status = os.stat_result((mode | 0o644, 1, 1, 1, 0, 0, 0, 0, 0, 0))
    assert odd_file(status) == f"{kind}, expected a regular file"
    assert kind_of(mode) in kind


def test_a_device_is_refused_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    file.write_text("x")
    device = os.stat_result((stat.S_IFCHR | 0o644, 1, 1, 1, 0, 0, 0, 0, 0, 0))
    with monkeypatch.context() as faked:
        faked.setattr(os, "lstat", lambda _: device)
        faked.setattr(os, "open", lambda *_: pytest.fail("was opened"))
        with pytest.raises(DestinationError, match="is a device"):
            read_plain(file)


def test_what_is_exchanged_after_the_look_is_refused_too(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_files, "_require_plain", lambda *_: True)  # as it was then
    for plant in (symlink, fifo, hard_link):
        place = tmp_path / plant.__name__
        plant(place, precious)
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with pytest.raises(DestinationError) as caught:
                own_files.open_plain(place, flags)
            assert caught.value.code == "CKM304"
    assert precious.read_text() == PRECIOUS


def test_a_file_that_cannot_be_written_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            write_new(tmp_path / "f", [b"x"])
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------ through convert


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "src.safetensors"
    save_file({f"l.{i}.weight": torch.randn(64, 64) for i in range(4)}, file)
    return file


def subdirectory(place: Path, target: Path) -> None:
    place.mkdir()


def regular(place: Path, target: Path) -> None:
    place.write_text("{}")


FOREIGN = {
    regular: "is a regular file that the plan does not name",
    subdirectory: "is a directory that the plan does not name",
    symlink: "is a symbolic link that the plan does not name",
    hard_link: "is a regular file that the plan does not name",
    fifo: "is a FIFO that the plan does not name",
}


@pytest.mark.parametrize("plant", FOREIGN)
@pytest.mark.parametrize("to", ["hf", "fsdp2", "full"])
def test_a_planted_file_is_not_published(
    dst: Path, source: Path, precious: Path, plant: Plant, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It appears while the run writes, under a name that a loader might read."""
    from ckptmap.operations.workspace import Workspace

    prove = Workspace.prove
    name = "generation_config.json" if plant is regular else "pytorch_model.bin"

    def planted(self: Workspace, done: object) -> object:
        errors = prove(self, done)  # type: ignore[arg-type]
        plant(self.out_dir / name, precious)
        return errors

    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "prove", planted)
        with pytest.raises(RunError, match=f"'{name}' {FOREIGN[plant]}") as caught:
            ckptmap.convert(source, dst, to=to)
    assert caught.value.code == "CKM401" and not dst.exists()
    assert caught.value.exit_code == 3, (
        "nothing of the command is wrong, and the same one continues"
    )
    for _ in range(2):  # and again at once, before anything is copied
        with pytest.raises(CkptmapError, match=name):
            ckptmap.convert(source, dst, to=to)
    (work,) = dst.parent.glob(".out.ckptmap-*/out")
    (work / name).rmdir() if plant is subdirectory else (work / name).unlink()
    assert ckptmap.convert(source, dst, to=to).continued_nbytes > 0
    assert precious.read_text() == PRECIOUS and ckptmap.verify(dst).ok


def test_a_missing_file_is_not_published(
    dst: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptmap.operations.workspace import Workspace

    prove = Workspace.prove

    def removed(self: Workspace, done: object) -> object:
        errors = prove(self, done)  # type: ignore[arg-type]
        (self.out_dir / "ckptmap.manifest.json").unlink()
        return errors

    monkeypatch.setattr(Workspace, "prove", removed)
    with pytest.raises(RunError, match=r"'ckptmap.manifest.json' is missing \(1 of 2 files\)"):
        ckptmap.convert(source, dst, to="hf")
    assert not dst.exists()


def test_a_planted_file_is_not_saved(dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptmap.live.save import write_dcp

    finish = write_dcp._finish

    def planted(layout: object, out_dir: Path, written: object) -> None:
        finish(layout, out_dir, written)  # type: ignore[arg-type]
        (out_dir / "model.safetensors").write_text("x")

    with monkeypatch.context() as patched:
        patched.setattr(write_dcp, "_finish", planted)
        with pytest.raises(RunError, match=r"'model\.safetensors' is a regular file that the plan"):
            ckptmap.save(dst, torch.nn.Linear(4, 4), background=False).wait()
    assert not dst.exists()
    ckptmap.save(dst, torch.nn.Linear(4, 4), background=False).wait()
    assert ckptmap.verify(dst).ok
