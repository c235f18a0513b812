"""A lock that cannot be read is told; none is left behind, whatever fails while it is released."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmap.errors import DestinationError
from ckptmap.storage import locks
from ckptmap.storage.locks import Lock, Owner, read_owner
from ckptmap.storage.publish import WorkDirectory
from ckptmap.storage.recover import clear_published

A = "a" * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".out.ckptmap-lock"


def left(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def content(**change: object) -> bytes:
    this = Owner.this()
    value = {"host": this.host, "pid": this.pid, "start": this.start, "token": "t", **change}
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"7",
        b"[" * 100_000,
        b'{"host": "h", "pid": 1e400, "start": 1, "token": "t"}',
        b'{"host": "h", "pid": ' + b"9" * 3000 + b', "start": 1, "token": "t"}',
        b'{"host": "h", "pid": ' + b"9" * 9000 + b', "start": 1, "token": "t"}',
        content(pid=-1),
        content(pid=True),
        content(pid="1"),
        content(start=None),
        content(token=3),
        content(host=None),
    ],
    ids=map(str, range(16)),  # contents hold the number of this process: workers must agree
)
def test_a_lock_that_cannot_be_parsed_is_told(
    path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "ATTEMPTS", 2)
    path.write_bytes(text)
    with pytest.raises(DestinationError, match="names no process that can be checked") as caught:
        Lock(path, path.with_name("out"))
    assert caught.value.code == "CKM305" and caught.value.hint.endswith(f"rm {path}")
    assert left(path.parent) == [path.name] and path.read_bytes() == text


@pytest.mark.parametrize("pid", [10**30, 10**99])
def test_a_pid_that_no_system_has_is_gone(path: Path, pid: int) -> None:
    path.write_bytes(content(pid=pid))
    Lock(path, path.with_name("out")).release()
    assert left(path.parent) == []


def test_a_lock_that_cannot_be_removed_is_marked_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full copy-on-write file system refuses unlink, too."""
    lock = Lock(path, path.with_name("out"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", full)
        lock.release()
    assert read_owner(path) is None and path.exists()
    Lock(path, path.with_name("out")).release()
    assert left(path.parent) == []


def test_a_full_disk_while_the_lock_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(DestinationError, match="No space left on device"):
            WorkDirectory.open(path.with_name("out"), A, one_file=False, overwrite=False)
    assert left(path.parent) == []


def test_without_hard_links_a_full_disk_leaves_no_empty_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, []

    def second_fails(fd: int, data: memoryview) -> int:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as broken:
        broken.setattr(os, "link", no_links)
        broken.setattr(os, "write", second_fails)
        with pytest.raises(OSError, match="No space left"):
            Lock(path, path.with_name("out"))
        assert left(path.parent) == []
        Lock(path, path.with_name("out")).release()
    assert left(path.parent) == []


def test_a_candidate_that_cannot_be_removed_costs_no_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        lock = Lock(path, path.with_name("out"))
    assert len(left(path.parent)) == 2
    lock.release()
    Lock(path, path.with_name("out")).release()
    assert left(path.parent) == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.EIO])
def test_a_lock_that_cannot_be_opened_while_it_is_released_is_removed(
    number: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    lock = Lock(path, path.with_name("out"))
    with monkeypatch.context() as broken:
        broken.setattr(os, "open", refuse)
        lock.release()
    assert left(path.parent) == []
    lock, theirs = Lock(path, path.with_name("out")), content(token="theirs")
    path.unlink()
    path.write_bytes(theirs)
    with monkeypatch.context() as broken:
        broken.setattr(os, "open", refuse)
        lock.release()
    assert path.read_bytes() == theirs


KILLED = """
import os, sys
from pathlib import Path
from ckptmap.storage import locks
unlink = {where}.unlink
def killed(*_, **__): os._exit(9)
lock = locks.Lock(Path(sys.argv[1]), Path("out")) if {late} else None
{where}.unlink = killed
lock.release() if lock else locks.Lock(Path(sys.argv[1]), Path("out"))
"""


@pytest.mark.parametrize(("where", "late"), [("os", True), ("Path", False)])
def test_a_kill_at_the_last_unlink_is_swept_by_the_next_run(
    path: Path, where: str, late: bool
) -> None:
    """Also by a run that finds its output complete, and by one that refuses the destination."""
    dst = path.with_name("out")
    for sweeper in ("open", "refused", "published"):
        code = KILLED.format(where=where, late=late)
        done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
        assert done.returncode == 9 and path.exists()
        if sweeper == "open":
            WorkDirectory.open(dst, A, one_file=False, overwrite=False).__exit__(None, None, None)
        elif sweeper == "refused":
            dst.write_text("old")
            with pytest.raises(DestinationError, match="exists"):
                WorkDirectory.open(dst, A, one_file=True, overwrite=False)
        else:
            assert list(clear_published(dst, A, synced=True)) == []
        assert [name for name in left(path.parent) if name != "out"] == []
