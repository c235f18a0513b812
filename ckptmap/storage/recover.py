"""Repair what killed runs left beside a destination: work directories, locks, old outputs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ckptmap.errors import DestinationError
from ckptmap.storage.locks import Lock
from ckptmap.storage.locks import sweep as sweep_locks
from ckptmap.storage.own_files import PENDING, kind_of, odd_file, read_plain, refusal
from ckptmap.storage.publish_by_marker import (
    OLD,
    PUBLISHING,
    REFUSED,
    is_pending,
    remove_probe,
    withdraw,
)
from ckptmap.storage.sync import sync

_DONE = ".done"
"""Suffix of a work directory that is being removed."""


_WORK_DIRECTORY = re.compile(r"\.(?P<name>.+)\.ckptmap-[0-9A-Za-z]{12}(\.done)?")

_LOCK = re.compile(r"\.(?P<name>.+)\.ckptmap-lock")


def work_path(dst: Path, plan_digest: str) -> Path:
    return dst.parent / f".{dst.name}.ckptmap-{plan_digest[:12]}"


def lock_path(dst: Path) -> Path:
    return dst.parent / f".{dst.name}.ckptmap-lock"


def sweep(dst: Path) -> None:
    """Remove what runs left that were killed after they published `dst`: locks, and work directories
    that nobody needs. Raises nothing. Does nothing if another process holds the lock.
    """
    with contextlib.suppress(OSError):
        sweep_locks(lock_path(dst), dst)
        if not is_pending(dst) and any(_is_left(work, dst) for work in _work_directories(dst)):
            lock = Lock(lock_path(dst), dst)
            try:
                _remove_left(dst, lock.uid)
            finally:
                lock.release()


def _remove_left(dst: Path, uid: int) -> None:
    for work in _work_directories(dst):
        if os.lstat(work).st_uid == uid and _is_left(work, dst):
            discard(work, synced=True)


def _is_left(work: Path, dst: Path) -> bool:
    """Return whether a work directory was being removed, or its output was published."""
    if not stat.S_ISDIR(os.lstat(work).st_mode):
        return False
    return work.suffix == _DONE or was_published(work, dst)


def _work_directories(dst: Path) -> list[Path]:
    """Return what lies beside `dst` by the name of a work directory; links, too."""
    pattern = re.compile(re.escape(f".{dst.name}.ckptmap-") + r"[0-9A-Za-z]{12}(\.done)?")
    return [entry for entry in sorted(dst.parent.iterdir()) if pattern.fullmatch(entry.name)]


def recover(dst: Path, mine: Path, uid: int) -> Iterator[str]:
    """Repair what killed runs left, and yield notes about it. The caller holds the lock."""
    if is_pending(dst):
        yield withdraw(dst, uid)
    for work in _work_directories(dst):
        status = os.lstat(work)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid:
            if work == mine:
                raise refusal(work, _strange(status, uid))
            yield f"{work}: left alone; it {_strange(status, uid)}"
            continue
        if work.suffix == _DONE:
            shutil.rmtree(work)
            continue
        remove_probe(work)
        old = _old(work)
        if old is not None and not os.path.lexists(dst):
            os.rename(old, dst)
            sync(dst.parent)
            yield f"{dst}: restored; a run was killed while it replaced it"
        elif was_published(work, dst):
            discard(work, synced=True)
            yield _removed(work)
        elif old is not None:
            raise DestinationError(
                "CKM304",
                f"{dst}: appeared while {old} held what was there before a run was killed",
                f"move {dst} or {old} away, then run again",
            )
        if work != mine and work.exists():
            discard(work)
            yield f"{work}: removed; left by another conversion that did not finish"
    (mine / PUBLISHING).unlink(missing_ok=True)


def sweep_saves(beside: Path) -> Iterator[str]:
    """Remove what killed saves left in the directory of a destination: their work directories and locks.
    Yields notes.

    A preempted run saves the next step under another name, so nobody would come back for them. The
    work of a conversion stays, since the same command continues it: it has a journal, and a save none.
    What a living process, or another machine, holds stays, too.
    """
    for work in sorted(beside.parent.iterdir()):
        if found := _LOCK.fullmatch(work.name):
            dst = work.with_name(found["name"])
            if not _work_directories(
                dst
            ):  # it was killed before it made one, or after it removed it
                sweep_locks(work, dst)
            continue
        match = _WORK_DIRECTORY.fullmatch(work.name)
        if match is None or match["name"] == beside.name or any(work.glob("journal*.jsonl")):
            continue
        dst = work.with_name(match["name"])
        try:
            lock = Lock(lock_path(dst), dst)
        except OSError:  # a DestinationError, too
            continue
        try:
            yield from recover(dst, work_path(dst, ""), lock.uid)
        except OSError as error:
            yield f"{work}: left by a killed run, and could not be removed: {error}"
        finally:
            lock.release()


def _strange(status: os.stat_result, uid: int) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return f"is {kind_of(status.st_mode)}, expected a directory"
    return f"belongs to user {status.st_uid}, expected {uid}"


def _old(work: Path) -> Path | None:
    """Return the path of the replaced output in a work directory; None if there is none."""
    old = work / OLD
    try:
        status = os.lstat(old)
    except FileNotFoundError:
        return None
    problem = "" if stat.S_ISDIR(status.st_mode) else odd_file(status, linked=True)
    if problem:
        raise refusal(old, problem)
    return old


def clear_published(dst: Path, plan_digest: str, synced: bool) -> Iterator[str]:
    """Remove what a run of this plan left that was killed just after it published. `dst` holds its
    whole output.

    Yields notes. Does nothing if another process holds the lock: that process removes it.
    """
    dst = Path(os.path.abspath(dst))  # noqa: PTH100 (as `WorkDirectory.open` names it)
    work = work_path(dst, plan_digest)
    done = work.with_name(work.name + _DONE)
    if not (work.is_dir() or done.is_dir() or is_pending(dst)):
        sweep(dst)
        return
    try:
        lock = Lock(lock_path(dst), dst)
    except OSError:  # a DestinationError, too
        return
    try:
        if synced:
            sync(dst.parent)
        if done.is_dir() and not done.is_symlink():
            shutil.rmtree(done)
        if is_pending(dst):
            (dst / PENDING).unlink()
        # A power cut may leave any part of the directory, also without the inode of the output. An
        # older output in it is kept unless this run is known to have replaced it.
        there = work.is_dir() and not work.is_symlink()
        if there and (_old(work) is None or was_published(work, dst)):
            discard(work, synced)
            yield _removed(work)
    except DestinationError as error:
        yield error.message
    except OSError as error:
        yield f"{error.filename}: could not be removed; delete it"
    finally:
        lock.release()


def _removed(work: Path) -> str:
    return f"{work}: removed; a run was killed just after it published"


def discard(work: Path, synced: bool = False) -> None:
    """Remove a work directory. It is renamed first, because a next run would misread half of one;
    with `synced` that is on the disk before anything in it is removed."""
    done = work.with_name(work.name + _DONE)
    shutil.rmtree(done, ignore_errors=True)
    try:
        os.rename(work, done)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        # Without a journal the next run believes nothing of what is left.
        for journal in work.glob("journal*.jsonl"):
            journal.unlink()
        done = work
    if synced:
        sync(work.parent)
    shutil.rmtree(done)


def was_published(work: Path, dst: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(read_plain(work / PUBLISHING, limit=64) or b"") == os.lstat(dst).st_ino
    return False
