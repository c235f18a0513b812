"""Where a directory cannot be renamed its files are moved one by one, the manifest last."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import DestinationError, RunError, SourceError
from ckptmap.storage import publish_by_marker
from ckptmap.storage.own_files import MANIFEST, PENDING
from ckptmap.storage.publish import WorkDirectory
from tests.support.files import leftovers, tree
from tests.support.forked import run_code

A = "a" * 16
NOTE = "its files were moved one by one, ckptmap.manifest.json last"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "src.safetensors", 1)


def made(file: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    save_file({f"l.{i}.weight": torch.randn(64, 64) for i in range(4)}, file)
    return file


Rename = Callable[[object, object], None]


@pytest.fixture(params=["EXDEV", "EPERM", "ENOSYS"])
def refusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As overlayfs (EXDEV), and FUSE mounts: no directory can be renamed; with ENOSYS no file."""
    number, rename = getattr(errno, request.param), os.rename

    def refuse(old: str | Path, new: str | Path) -> None:
        if os.path.isdir(old) or request.param == "ENOSYS":
            raise OSError(number, os.strerror(number), str(old))
        rename(old, new)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(
        "ckptmap.storage.publish._renameat2",
        lambda *_: pytest.fail("was renamed"),
    )
    yield


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("sync", [True, False])
def test_an_output_is_published_file_by_file(source: Path, tmp_path: Path, sync: bool) -> None:
    dst = tmp_path / "out"
    report = ckptmap.convert(source, dst, to="hf", max_shard_nbytes=20_000, sync=sync)
    assert any(NOTE in note for note in report.notes)
    assert ckptmap.verify(dst, against=source).ok
    assert sorted(tree(dst)) == sorted(os.listdir(dst)) and PENDING not in os.listdir(dst)
    assert leftovers(tmp_path) == []
    assert (
        "was complete already"
        in ckptmap.convert(source, dst, to="hf", max_shard_nbytes=20_000).notes
    )


@pytest.mark.usefixtures("refusing")
def test_an_output_is_replaced_file_by_file(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    ckptmap.convert(source, dst, to="fsdp2", world_size=3)
    other = made(tmp_path / "other.safetensors", 2)
    with pytest.raises(DestinationError, match="exists"):
        ckptmap.convert(other, dst, to="hf")
    ckptmap.convert(other, dst, to="hf", overwrite=True)
    assert ckptmap.verify(dst, against=other).ok
    assert not list(dst.glob("*.distcp")) and leftovers(tmp_path) == []


@pytest.mark.usefixtures("refusing")
def test_a_live_save_is_published_file_by_file(tmp_path: Path) -> None:
    for overwrite in (False, True):
        model = torch.nn.Linear(8, 8)
        notes = ckptmap.save(tmp_path / "out", model, overwrite=overwrite, background=False).wait()
        assert any(NOTE in note for note in notes)
        assert ckptmap.verify(tmp_path / "out").ok
    assert leftovers(tmp_path) == []


def test_the_manifest_is_the_last(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []
    move = publish_by_marker._move

    def seen(old: Path, new: Path, synced: bool) -> None:
        moved.append(new.name)
        assert (new.parent / PENDING).exists()
        move(old, new, synced)

    monkeypatch.setattr(publish_by_marker, "_move", seen)
    monkeypatch.setattr("ckptmap.storage.publish.rename_problem", lambda *_: "no")
    ckptmap.convert(source, tmp_path / "out", to="fsdp2", world_size=2)
    assert moved == ["__0_0.distcp", "__1_0.distcp", ".metadata", MANIFEST]


@pytest.mark.parametrize("renames", [True, False])
def test_killed_after_any_step_it_is_no_checkpoint_and_the_next_run_finishes(
    source: Path, tmp_path: Path, renames: bool
) -> None:
    """Also while it replaces another output."""
    other = made(tmp_path / "other.safetensors", 2)
    code = (
        "import os, sys, ckptmap\n"
        "from ckptmap.storage import publish, publish_by_marker as marker\n"
        "publish.rename_problem = lambda *_: 'no'\n"
        "left, move, unlink = [int(sys.argv[1])], marker._move, marker.Path.unlink\n"
        "def step():\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0: os._exit(9)\n"
        "def moved(*given, **named):\n    step(); move(*given, **named)\n"
        "def unlinked(self, missing_ok=False):\n"
        "    if self.parent.name == 'out' and '.out.' not in str(self): step()\n"
        "    unlink(self, missing_ok)\n"
        "marker._move, marker.Path.unlink, rename = moved, unlinked, os.rename\n"
        "def renamed(old, new):\n"
        "    if 'replaced' in str(new): step()\n"
        "    rename(old, new)\n"
        "def refuse(*_): raise OSError(38, 'Function not implemented')\n"
        + ("os.rename = renamed\n" if renames else "os.rename = refuse\n")
        + f"ckptmap.convert({str(source)!r}, {str(tmp_path / 'out')!r}, to='fsdp2', overwrite=True)"
    )
    dst, kills = tmp_path / "out", 0
    for step in range(20):
        ckptmap.convert(other, dst, to="hf", overwrite=True)
        ended = run_code(code, step)
        if ended == 0:
            break
        assert ended == 9
        kills += 1
        with pytest.raises(
            SourceError, match="is not complete: ckptmap publishes it now"
        ) as caught:
            ckptmap.open(dst)
        assert caught.value.code == "CKM111"
        assert not ckptmap.verify(dst).ok
        assert run_code(code, 99) == 0
        assert ckptmap.verify(dst, against=source).ok and leftovers(tmp_path) == []
        assert sorted(os.listdir(dst)) == [".metadata", "__0_0.distcp", MANIFEST]
    assert kills >= 6
    assert ckptmap.verify(dst, against=source).ok


def texts(directory: Path) -> dict[str, str]:
    files = (file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): file.read_text() for file in files}


class Killed(BaseException):
    """Ends a run between two steps: nothing is cleaned up after it."""


def test_killed_at_any_step_the_replaced_output_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one may never be finished: its source is gone, or another conversion is wanted."""
    dst = tmp_path / "out"
    (dst / "sub").mkdir(parents=True)
    for name in ("a", "b", "sub/c", MANIFEST):
        (dst / name).write_text(f"old {name}")
    before, left = texts(dst), [0]
    rename, unlink = os.rename, Path.unlink

    def step() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    def renamed(old: str | Path, new: str | Path) -> None:
        step()
        rename(old, new)

    def unlinked(self: Path, missing_ok: bool = False) -> None:
        step()
        unlink(self, missing_ok)

    monkeypatch.setattr("ckptmap.storage.publish.rename_problem", lambda *_: "no")
    kills = 0
    for steps in range(30):
        work = WorkDirectory.open(dst, A, one_file=False, overwrite=True)
        for name in ("a", "d", "sub/e", MANIFEST):
            (work.out_dir / name).parent.mkdir(exist_ok=True)
            (work.out_dir / name).write_text(f"new {name}")
        left[0] = steps
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(os, "rename", renamed)
            patch.setattr(Path, "unlink", unlinked)
            work.publish(["a", "d", "sub/e", MANIFEST])
        kills += 1
        work._lock.release()
        if (dst / "d").exists() and not (dst / PENDING).exists():
            break  # it was published, and killed while it cleaned up
        again = "b" * 16 if kills % 2 else A
        with pytest.raises(DestinationError, match="exists") as caught:
            WorkDirectory.open(dst, again, one_file=False, overwrite=False)
        assert caught.value.code == "CKM301" and texts(dst) == before, steps
    assert kills > 10 and texts(dst) == {n: f"new {n}" for n in ("a", "d", "sub/e", MANIFEST)}


def test_another_run_takes_it_back_first(source: Path, tmp_path: Path) -> None:
    """A plain rename is possible again, or another conversion is wanted."""
    dst = tmp_path / "out"
    killed = (
        "import os, ckptmap\n"
        "from ckptmap.storage import publish, publish_by_marker as marker\n"
        "publish.rename_problem = lambda *_: 'no'\n"
        "move = marker._move\n"
        "def last(old, new, synced):\n"
        "    if new.name == marker.MANIFEST: os._exit(9)\n"
        "    move(old, new, synced)\n"
        "marker._move = last\n"
        f"ckptmap.convert({str(source)!r}, {str(dst)!r}, to='hf')"
    )
    for to in ("hf", "fsdp2"):
        assert run_code(killed) == 9
        report = ckptmap.convert(source, dst, to=to)
        assert any("it was taken back first" in note for note in report.notes)
        assert (report.continued_nbytes > 0) == (to == "hf")
        assert ckptmap.verify(dst, against=source).ok and leftovers(tmp_path) == []
        subprocess.run(["rm", "-r", str(dst)], check=True)


RECORD = {"work": f".out.ckptmap-{A[:12]}", "files": ["a"], "replaced": []}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "cannot be read"),
        (json.dumps({**RECORD, "files": ["../../etc/passwd"]}), "names files elsewhere"),
        (json.dumps({**RECORD, "files": ["/etc/passwd"]}), "names files elsewhere"),
        (json.dumps({**RECORD, "replaced": [7]}), "names files elsewhere"),
        (json.dumps({**RECORD, "work": "../theirs"}), "names files elsewhere"),
        (json.dumps(RECORD), "with the rest is gone"),
    ],
)
def test_a_record_that_is_none_is_told(tmp_path: Path, record: str, message: str) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    (dst / PENDING).write_text(record)
    (dst / "a").write_text("theirs")
    with pytest.raises(DestinationError, match=message) as caught:
        WorkDirectory.open(dst, A, one_file=False, overwrite=True)
    assert caught.value.code == "CKM304" and (dst / "a").read_text() == "theirs"


@pytest.mark.parametrize("record", ["", '{"work": ".out.ck'])
def test_half_of_a_record_alone_is_not_in_the_way(tmp_path: Path, record: str) -> None:
    """Where it cannot be put there at once, a run may be killed while it is written."""
    dst = tmp_path / "out"
    dst.mkdir()
    (dst / PENDING).write_text(record)
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False) as work:
        assert any("was killed before it published a file" in note for note in work.notes)
        assert os.listdir(dst) == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("replaces", [True, False])
def test_a_record_appears_whole_and_after_all_that_it_names(
    replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a rename, once it and the names in the work directory are on the disk."""
    dst, done = tmp_path / "out", []
    if replaces:
        dst.mkdir()
        (dst / "old").write_text("old")
    real_sync, real_rename = publish_by_marker.sync, os.rename

    def sync(path: str | Path) -> None:
        done.append(("sync", Path(path).name))
        real_sync(path)

    def rename(old: str | Path, new: str | Path) -> None:
        done.append(("rename", Path(new).name))
        real_rename(old, new)

    monkeypatch.setattr("ckptmap.storage.publish.rename_problem", lambda *_: "no")
    with WorkDirectory.open(dst, A, one_file=False, overwrite=replaces) as work:
        (work.out_dir / "a").write_text("ours")
        monkeypatch.setattr(publish_by_marker, "sync", sync)
        monkeypatch.setattr(os, "rename", rename)
        work.publish(["a"])
    at = done.index(("rename", PENDING))
    assert [name for _, name in done[at - 3 : at]] == ["pending", work.path.name, tmp_path.name]
    assert sorted(os.listdir(dst)) == ["a"] and leftovers(tmp_path) == []


def test_a_file_of_others_that_appears_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, move = tmp_path / "out", publish_by_marker._move

    def late(old: Path, new: Path, synced: bool) -> None:
        (dst / "a").write_text("theirs")
        move(old, new, synced)

    monkeypatch.setattr("ckptmap.storage.publish.rename_problem", lambda *_: "no")
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False) as work:
        (work.out_dir / "a").write_text("ours")
        with monkeypatch.context() as patched:
            patched.setattr(publish_by_marker, "_move", late)
            with pytest.raises(DestinationError, match="appeared while it was published"):
                work.publish(["a"])
    assert (dst / "a").read_text() == "theirs"


def test_where_no_file_can_be_renamed_a_file_is_refused_before_the_first_byte(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr("ckptmap.execution.execute.Outputs", lambda *_: pytest.fail("was written"))
    with pytest.raises(DestinationError, match="its file system cannot rename a file") as caught:
        ckptmap.convert(source, tmp_path / "out.pt", to="full")
    assert caught.value.code == "CKM304" and leftovers(tmp_path) == []


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """An overlayfs with an output of an earlier run in its lower layer, as in a container's image."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / "layers" / name).mkdir(parents=True)
    layers = tmp_path / "layers"
    ckptmap.convert(made(tmp_path / "old.safetensors", 3), layers / "lower" / "out", to="hf")
    options = (
        f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work,redirect_dir=off"
    )
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(layers / "merged")]
    try:
        done = subprocess.run(mount, check=False, capture_output=True)
    except OSError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("overlayfs cannot be mounted here")
    try:
        yield layers / "merged"
    finally:
        subprocess.run(["umount", str(layers / "merged")], check=True)


def test_on_overlayfs_the_output_of_a_lower_layer_is_replaced(overlay: Path, source: Path) -> None:
    dst = overlay / "out"
    with pytest.raises(OSError, match="cross-device"):
        os.rename(dst, overlay / "elsewhere")
    report = ckptmap.convert(source, dst, to="fsdp2", overwrite=True)
    assert any(NOTE in note and "cross-device" in note for note in report.notes)
    assert ckptmap.verify(dst, against=source).ok and leftovers(overlay) == []
    new = ckptmap.convert(source, overlay / "new", to="hf")  # in the upper layer one rename does
    assert not any(NOTE in note for note in new.notes)


REPLACING = """
import os, shutil, sys, ckptmap
rename, left = os.rename, [int(sys.argv[3])]
def replace(old, new):
    if os.path.isdir(new) and os.listdir(new):
        left[0] -= 1
        if left[0] == 0: os._exit(9)
        shutil.rmtree(new)
        rename(old, new)
        left[0] -= 1
        if left[0] == 0: os._exit(9)
    else:
        rename(old, new)
os.rename = replace
ckptmap.convert(sys.argv[1], sys.argv[2], to="fsdp2", overwrite=True)
"""


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_file_system_that_replaces_full_directories_loses_nothing_by_the_probe(
    tmp_path: Path, after: int
) -> None:
    """Killed while `dst` is renamed to try it: the next run, whatever it writes, restores it."""
    dst = tmp_path / "out"
    old, new = (made(tmp_path / f"{name}.safetensors", len(name)) for name in ("a", "bc"))
    ckptmap.convert(old, dst, to="hf")
    assert run_code(REPLACING, new, dst, after) == (9 if after <= 2 else 0)
    if after <= 2:
        with pytest.raises(DestinationError, match="out: exists"):
            ckptmap.convert(new, dst, to="hf")
        assert ckptmap.verify(dst, against=old).ok
        assert run_code(REPLACING, new, dst, 99) == 0
    assert ckptmap.verify(dst, against=new).ok
    assert leftovers(tmp_path) == []


def test_an_empty_mount_point_is_filled_file_by_file(source: Path, tmp_path: Path) -> None:
    """A mount point cannot be renamed nor replaced (EBUSY): that is known before the first byte."""
    dst = tmp_path / "out"
    dst.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(dst)]
    try:
        mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("nothing can be mounted here")
    try:
        report = ckptmap.convert(source, dst, to="fsdp2")
        assert any(NOTE in note and "busy" in note for note in report.notes)
        assert ckptmap.verify(dst, against=source).ok and leftovers(tmp_path) == []
        assert os.path.ismount(dst) and PENDING not in os.listdir(dst)
        notes = ckptmap.convert(source, dst, to="fsdp2").notes
        assert "was complete already" in notes and leftovers(tmp_path) == []
        subprocess.run(["find", str(dst), "-type", "f", "-delete"], check=True)
        torch.manual_seed(0)
        save_file({"w": torch.randn(600_000)}, tmp_path / "big.safetensors")
        with pytest.raises(
            DestinationError, match=r"out: needs [\d.]+ \w+, [\d.]+ \w+ free"
        ) as caught:
            ckptmap.convert(tmp_path / "big.safetensors", dst, to="fsdp2")
        assert caught.value.code == "CKM303" and leftovers(tmp_path) == []
    finally:
        subprocess.run(["umount", str(dst)], check=True)


def test_a_planted_file_is_not_published_that_way_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmap.storage.publish.rename_problem", lambda *_: "no")
    dst = tmp_path / "out"
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False) as work:
        for name in ("a", "pytorch_model.bin"):
            (work.out_dir / name).write_text("x")
        with pytest.raises(RunError, match=r"'pytorch_model\.bin' is a regular file that the plan"):
            work.publish(["a"])
    assert not dst.exists()
