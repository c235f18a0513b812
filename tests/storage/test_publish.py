"""Publishing is all or nothing, with one writer, whatever kills a run."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckptmap.errors import DestinationError, RunError
from ckptmap.storage import publish
from ckptmap.storage.destination import check_overlap, check_space
from ckptmap.storage.journal import Journal
from ckptmap.storage.locks import Owner, read_owner
from ckptmap.storage.publish import WorkDirectory
from ckptmap.storage.sync import files_below

A, B = "a" * 16, "b" * 16


def fill_dir(work: WorkDirectory, text: str = "new") -> None:
    (work.out_dir / "part").mkdir(exist_ok=True)
    (work.out_dir / "part" / "x").write_text(text)
    (work.out_dir / "index").write_text(text)


def publish_all(work: WorkDirectory) -> None:
    """Publish whatever was written."""
    files = [Path(file).relative_to(work.out_dir).as_posix() for file in files_below(work.out_dir)]
    work.publish(files)


def left(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def code_of(caught: pytest.ExceptionInfo[DestinationError]) -> str:
    return caught.value.code


def journaled(work: WorkDirectory) -> None:
    """As if one unit were done: the work is worth keeping."""
    work.journal_path.write_text('{"plan": "x"}\n{"unit": "u", "slots": []}\n')


def test_directory_appears_whole(tmp_path: Path) -> None:
    dst = tmp_path / "made" / "here" / "out"
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False) as work:
        fill_dir(work)
        assert not dst.exists()
        publish_all(work)
    assert (dst / "part" / "x").read_text() == "new"
    assert left(dst.parent) == ["out"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(dst.stat().st_mode) == 0o777 & ~umask


def test_file_appears_whole(tmp_path: Path) -> None:
    dst = tmp_path / "model.pt"
    with WorkDirectory.open(dst, A, one_file=True, overwrite=False) as work:
        (work.out_dir / "whatever.pt").write_text("new")
        publish_all(work)
    assert dst.read_text() == "new"
    assert left(tmp_path) == ["model.pt"]


def test_empty_directory_may_be_used(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False) as work:
        fill_dir(work)
        publish_all(work)
    assert left(dst) == ["index", "part"]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("one_file", [True, False])
def test_overwrite_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, one_file: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(publish, "_renameat2", lambda *_: False)
    dst = tmp_path / "out"
    if one_file:
        dst.write_text("old")
    else:
        (dst / "stale").mkdir(parents=True)
    with WorkDirectory.open(dst, A, one_file=one_file, overwrite=True) as work:
        if one_file:
            (work.out_dir / "f").write_text("new")
        else:
            fill_dir(work)
        publish_all(work)
    assert left(tmp_path) == ["out"]
    assert dst.read_text() == "new" if one_file else left(dst) == ["index", "part"]


def test_without_renameat2_a_new_file_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_renameat2", lambda *_: False)
    dst = tmp_path / "f"
    with WorkDirectory.open(dst, A, one_file=True, overwrite=False) as work:
        (work.out_dir / "f").write_text("new")
        publish_all(work)
    assert dst.read_text() == "new"
    assert left(tmp_path) == ["f"]


def test_existing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("old")
    (tmp_path / "f").write_text("old")
    for name, one_file, message in [
        ("d", False, "d: exists"),
        ("f", True, "f: exists"),
        ("d", True, "is a directory, expected a file"),
        ("f", False, "is a file, expected a directory"),
    ]:
        with pytest.raises(DestinationError, match=message) as caught:
            WorkDirectory.open(tmp_path / name, A, one_file=one_file, overwrite=False)
        assert code_of(caught) == "CKM301"
    assert left(tmp_path) == ["d", "f"]


def test_links_and_devices_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name, message in [("link", "symbolic link"), ("dangling", "symbolic"), ("pipe", "special")]:
        for one_file in (True, False):
            with pytest.raises(DestinationError, match=message) as caught:
                WorkDirectory.open(tmp_path / name, A, one_file=one_file, overwrite=True)
            assert code_of(caught) == "CKM304"
    with pytest.raises(DestinationError, match="null: is a special file"):
        WorkDirectory.open(Path("/dev/null"), A, one_file=True, overwrite=True)
    assert left(tmp_path) == ["dangling", "link", "pipe", "real"]


def test_lived_in_directories_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "in").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home" / "in")
    with pytest.raises(DestinationError, match="holds the working directory"):
        WorkDirectory.open(tmp_path / "home", A, one_file=False, overwrite=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "in"))
    monkeypatch.chdir("/")
    with pytest.raises(DestinationError, match="holds the home directory"):
        WorkDirectory.open(tmp_path / "home", A, one_file=False, overwrite=True)
    with pytest.raises(DestinationError, match="is not a path that an output can have"):
        WorkDirectory.open(Path("/"), A, one_file=False, overwrite=True)


def test_something_appears_meanwhile(tmp_path: Path) -> None:
    for one_file in (True, False):
        dst = tmp_path / f"out{one_file}"
        with (
            pytest.raises(DestinationError, match="exists") as caught,
            WorkDirectory.open(dst, A, one_file=one_file, overwrite=False) as work,
        ):
            (work.out_dir / "f").write_text("new")
            journaled(work)
            if one_file:
                dst.write_text("theirs")
            else:
                dst.mkdir()
                (dst / "theirs").write_text("theirs")
            publish_all(work)
        assert code_of(caught) == "CKM301"
        assert work.out_dir.exists()
    with pytest.raises(DestinationError, match="appeared while it was written"):
        publish._renameat2(work.out_dir, dst, publish._NOREPLACE)


def test_no_space_is_told_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match=r"needs [\d.]+ TiB, [\d.]+ \w+ free") as caught:
        WorkDirectory.open(tmp_path / "out", A, one_file=False, overwrite=False, nbytes=10**17 * 3)
    assert code_of(caught) == "CKM303"
    assert left(tmp_path) == []
    check_space(tmp_path, 10**18, present=10**18)


def test_unwritable_parent(tmp_path: Path) -> None:
    """As another user where the test runs as root, whom modes do not stop."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    code = (
        "import os; from pathlib import Path; from ckptmap.storage.publish import WorkDirectory\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        f"WorkDirectory.open(Path({str(folder / 'new' / 'out')!r}), {A!r}, False, False)"
    )
    for place in [tmp_path, *tmp_path.parents][:3]:
        place.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot be written: Permission denied" in done.stderr
    assert left(folder) == []


def test_overlap_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "deep").mkdir(parents=True)
    file = source / "f"
    file.write_text("x")
    (tmp_path / "alias").symlink_to(source)
    os.link(file, tmp_path / "hard")
    for sources, dst, message in [
        ([source], source, "is the source"),
        ([file], file, "is the source"),
        ([source], tmp_path / "alias" / ".." / "src", "is the source"),
        ([tmp_path / "alias"], source / "deep" / "new", "is inside the source"),
        ([source], tmp_path / "alias" / "new", "is inside the source"),
        ([source / "deep"], source, "contains the source"),
        ([file], tmp_path / "alias", "contains the source"),
        ([file], tmp_path / "hard", "is the source"),
    ]:
        with pytest.raises(DestinationError, match=message) as caught:
            check_overlap([str(item) for item in sources], dst)
        assert code_of(caught) == "CKM302"
    check_overlap([str(source)], tmp_path / "src2")
    check_overlap([str(file)], source / "g")


# ---------------------------------------------------------------------------- continuing


def test_failed_work_is_kept_and_continued(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    with (
        pytest.raises(ZeroDivisionError, match="boom"),
        WorkDirectory.open(dst, A, one_file=False, overwrite=False) as work,
    ):
        fill_dir(work)
        journaled(work)
        raise ZeroDivisionError("boom")
    assert left(tmp_path) == [".out.ckptmap-aaaaaaaaaaaa"]
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False) as again:
        assert (again.out_dir / "part" / "x").read_text() == "new"
        assert again.journal_path.exists()
        publish_all(again)
    assert left(tmp_path) == ["out"]


def test_a_work_directory_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with (
        WorkDirectory.open(tmp_path / "out", A, one_file=False, overwrite=False) as work,
        monkeypatch.context() as broken,
    ):
        broken.setattr(os, "scandir", refuse)
        with pytest.raises(
            DestinationError, match="cannot be written: Permission denied"
        ) as caught:
            work.refuse_strangers(["a"])
    assert code_of(caught) == "CKM304"
    assert left(tmp_path) == []


def test_a_refusal_before_work_keeps_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(DestinationError, match="full"),
        WorkDirectory.open(tmp_path / "out", A, one_file=False, overwrite=False) as work,
    ):
        (work.out_dir / "reserved").write_text("x")
        raise DestinationError("CKM303", "full")
    assert left(tmp_path) == []


def test_leftovers_of_another_plan_go_with_a_note(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    with (
        pytest.raises(ZeroDivisionError, match="boom"),
        WorkDirectory.open(dst, A, one_file=False, overwrite=False) as work,
    ):
        journaled(work)
        raise ZeroDivisionError("boom")
    (tmp_path / ".out.ckptmap-other").mkdir()  # not one of ours: 5 letters
    (tmp_path / ".out2.ckptmap-aaaaaaaaaaaa").mkdir()  # another destination's
    with WorkDirectory.open(dst, B, one_file=False, overwrite=False) as work:
        assert any("left by another conversion" in note for note in work.notes)
    assert left(tmp_path) == [".out.ckptmap-other", ".out2.ckptmap-aaaaaaaaaaaa"]


def test_killed_between_two_renames(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    work = tmp_path / ".out.ckptmap-aaaaaaaaaaaa"
    (work / "out").mkdir(parents=True)
    (work / "old").mkdir()
    (work / "old" / "precious").write_text("old")
    (work / "publishing").write_text(str((work / "out").stat().st_ino))
    with (
        pytest.raises(DestinationError, match="out: exists"),
        WorkDirectory.open(dst, B, one_file=False, overwrite=False),
    ):
        pass
    assert (dst / "precious").read_text() == "old"


def test_old_content_is_never_lost(tmp_path: Path) -> None:
    """Killed between the renames, and then something else appeared at the destination."""
    dst, work = tmp_path / "out", tmp_path / ".out.ckptmap-aaaaaaaaaaaa"
    (work / "old").mkdir(parents=True)
    dst.mkdir()
    with pytest.raises(DestinationError, match="held what was there before"):
        WorkDirectory.open(dst, A, one_file=False, overwrite=True)
    assert (work / "old").exists()
    assert read_owner(tmp_path / ".out.ckptmap-lock") is None


def test_killed_after_the_exchange_does_not_mix(tmp_path: Path) -> None:
    """Then `out` in the work directory is the old content: it must not be continued."""
    dst, work = tmp_path / "out", tmp_path / ".out.ckptmap-aaaaaaaaaaaa"
    dst.mkdir()
    (dst / "new").write_text("new")
    (work / "out").mkdir(parents=True)
    (work / "out" / "old").write_text("old")
    (work / "publishing").write_text(str(dst.stat().st_ino))
    with WorkDirectory.open(dst, A, one_file=False, overwrite=True) as again:
        assert left(again.out_dir) == []
        assert any("just after it published" in note for note in again.notes)


def test_failing_rename_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst = tmp_path / "out"
    dst.write_text("old")

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with (
        pytest.raises(RunError, match="cannot be published: Input/output error"),
        WorkDirectory.open(dst, A, one_file=True, overwrite=True) as work,
    ):
        (work.out_dir / "f").write_text("new")
        journaled(work)
        monkeypatch.setattr(publish, "_renameat2", fail)
        publish_all(work)
    monkeypatch.undo()
    assert dst.read_text() == "old"
    with WorkDirectory.open(dst, A, one_file=True, overwrite=True) as work:
        publish_all(work)
    assert dst.read_text() == "new"


KILLED = """
import sys
from pathlib import Path
from ckptmap.storage.publish import WorkDirectory
dst = Path(sys.argv[1])
for turn in range(100000):
    with WorkDirectory.open(dst, "{:012x}".format(turn), False, True) as work:
        for name in "abc":
            (work.out_dir / name).write_text(str(turn))
        work.publish("abc")
    print(turn, flush=True)
"""


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_any_point_of_publishing(tmp_path: Path, exchange: bool) -> None:
    """SIGKILL while a process overwrites in a loop: the destination is always one whole turn."""
    dst = tmp_path / "out"
    patch = "import ckptmap.storage.publish as p; p._renameat2 = lambda *_: False\n"
    code = KILLED if exchange else patch + KILLED
    for attempt in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(dst)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.003 * attempt)
        child.kill()
        child.wait()
        with WorkDirectory.open(dst, B, one_file=False, overwrite=True):
            assert left(dst) == ["a", "b", "c"]
            assert len({(dst / name).read_text() for name in "abc"}) == 1
        assert left(tmp_path) == ["out"]


# --------------------------------------------------------------------------------- locks


def test_second_writer_is_told_who_writes(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False):
        message = f"being written by pid {os.getpid()} on host {socket.gethostname()}"
        with pytest.raises(DestinationError, match=message) as caught:
            WorkDirectory.open(dst, B, one_file=False, overwrite=False)
        assert code_of(caught) == "CKM305"
    with WorkDirectory.open(dst, B, one_file=False, overwrite=False):
        pass
    assert left(tmp_path) == []


@pytest.mark.parametrize("change", [{"pid": 2**22 + 5}, {"start": 1}, {}, {"host": "elsewhere"}])
def test_stale_locks(tmp_path: Path, change: dict[str, object]) -> None:
    """A dead process, a number used again: taken over. Alive, or of another host: not."""
    lock = tmp_path / ".out.ckptmap-lock"
    this = Owner.this()
    value = {"host": this.host, "pid": this.pid, "start": this.start, "token": "t", **change}
    lock.write_text(json.dumps(value))
    if "pid" in change or "start" in change:
        with WorkDirectory.open(tmp_path / "out", A, one_file=False, overwrite=False):
            owner = read_owner(lock)
            assert owner is not None and owner.pid == os.getpid()
        assert not lock.exists()
    else:
        with pytest.raises(DestinationError, match="is being written by pid"):
            WorkDirectory.open(tmp_path / "out", A, one_file=False, overwrite=False)
        assert json.loads(lock.read_text()) == value


def test_unreadable_lock_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".out.ckptmap-lock").write_text("{")
    with pytest.raises(DestinationError, match="names no process that can be checked"):
        WorkDirectory.open(tmp_path / "out", A, one_file=False, overwrite=False)


def test_killed_child_not_yet_waited_for_is_gone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert Owner(socket.gethostname(), child.pid, 0, "t").is_gone
    child.wait()


def test_race_for_a_stale_lock(tmp_path: Path) -> None:
    """Many threads find the same stale lock: one at a time gets in."""
    dst, inside, most, entered = tmp_path / "out", [0], [0], [0]
    guard = threading.Lock()

    def contend() -> None:
        for _ in range(20):
            try:
                with WorkDirectory.open(dst, A, one_file=False, overwrite=False):
                    with guard:
                        inside[0] += 1
                        entered[0] += 1
                        most[0] = max(most[0], inside[0])
                    with guard:
                        inside[0] -= 1
            except DestinationError as error:
                assert error.code == "CKM305"

    for _ in range(5):
        stale = {"host": socket.gethostname(), "pid": 2**22 + 5, "start": 1, "token": "t"}
        (tmp_path / ".out.ckptmap-lock").write_text(json.dumps(stale))
        threads = [threading.Thread(target=contend) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert entered[0] >= 5
    assert most[0] == 1
    assert left(tmp_path) == []


def test_race_of_processes(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ckptmap.storage.publish import WorkDirectory\n"
        "from ckptmap.errors import DestinationError\n"
        "try:\n"
        f"    with WorkDirectory.open(Path({str(tmp_path / 'out')!r}), {A!r}, False, False) as work:\n"
        "        (work.out_dir / 'x').write_text(sys.argv[1]); time.sleep(0.5); work.publish('x')\n"
        "    print('won')\n"
        "except DestinationError as error: print(error.code)\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    said = sorted(run.communicate(timeout=30)[0].strip() for run in runs)
    assert said.count("won") == 1
    assert set(said) <= {"won", "CKM305", "CKM301"}
    assert left(tmp_path) == ["out"]


def test_what_cannot_be_removed_afterwards_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no", "somewhere")

    dst = tmp_path / "out"
    with WorkDirectory.open(dst, A, one_file=False, overwrite=False) as work:
        fill_dir(work)
        monkeypatch.setattr(publish, "discard", refuse)
        monkeypatch.setattr("ckptmap.storage.locks.Lock.release", refuse)
        publish_all(work)
    assert (dst / "index").read_text() == "new" and "could not be removed" in work.notes[-1]


@pytest.mark.parametrize("call", ["os.replace", "os.open", "os.write", "pathlib.Path.iterdir"])
def test_a_journal_that_cannot_be_begun_is_an_expected_error(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(call, refuse)
        with pytest.raises(RunError, match=r"journal\.jsonl: write failed: Input") as caught:
            Journal(tmp_path / "journal.jsonl", A)
    assert caught.value.code == "CKM306"
