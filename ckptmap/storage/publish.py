"""Publish an output as a whole or not at all: write it beside its destination, then rename it.

    .NAME.ckptmap-lock           the process that writes NAME now
    .NAME.ckptmap-DIGEST/        the work directory; beside NAME, because a rename cannot cross
                                 filesystems
        journal.jsonl            the units of work that are finished
        out/                     the output: a directory, or the one file in it
        publishing               the inode of the output: tells whether the rename happened
        old                      the replaced output, where the system cannot exchange two paths
    .NAME.ckptmap-DIGEST.done/   a work directory that is being removed

A run that fails leaves the destination as it was, and keeps the work directory for the next run of
the same plan. The next `WorkDirectory.open` takes the lock and repairs what a killed run left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ckptmap.errors import DestinationError, RunError
from ckptmap.storage.destination import cannot_write, check_destination, check_space
from ckptmap.storage.locks import Lock
from ckptmap.storage.resource_limits import or_resource_error

_DONE = ".done"
"""Suffix of a work directory that is being removed."""
_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


class WorkDirectory:
    """A locked directory to write one output in: write into `out_dir`, then call `publish`.

    Use it as a context. Leaving it releases the lock. The work is kept for the next run unless it
    was published, or the run was refused before it finished any unit of work.
    """

    def __init__(self, dst: Path, path: Path, one_file: bool, overwrite: bool, lock: Lock) -> None:
        self.dst, self.path = dst, path
        self.one_file, self.overwrite = one_file, overwrite
        self.out_dir = path / "out"
        self.journal_path = path / "journal.jsonl"
        self.notes: tuple[str, ...] = ()
        """Notes for the user: what was restored or removed after a killed run."""
        self._lock = lock

    @classmethod
    def open(
        cls, dst: Path, plan_digest: str, one_file: bool, overwrite: bool, nbytes: int = 0
    ) -> WorkDirectory:
        """Check and lock the destination, repair what a killed run left, and make the directory.

        `nbytes` is the size of the output, for the check of free space. Raises DestinationError:
        CKM301 if the destination exists, CKM303 if there is no space, CKM304 if it cannot be
        written or must not be replaced, CKM305 if another process writes it.
        """
        if dst.parts[:1] == ("hf:",):
            raise DestinationError(
                "CKM304",
                f"hf://{'/'.join(dst.parts[1:])}: is not a path on this machine",
                "write to a local path, then publish it with ckptmap push",
            )
        dst = Path(os.path.abspath(dst))  # noqa: PTH100 (resolve would follow a link at dst)
        if not re.fullmatch(r"[0-9A-Za-z]{12,}", plan_digest):
            raise ValueError(f"plan digest {plan_digest!r}: expected at least 12 letters or digits")
        check_destination(dst, one_file, overwrite)
        try:
            dst.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock(_lock_path(dst), dst)
        except DestinationError:
            raise
        except OSError as error:
            raise cannot_write(dst, error) from error
        path = _work_path(dst, plan_digest)
        try:
            work = cls(dst, path, one_file, overwrite, lock)
            work.notes = tuple(_recover(dst, path))
            check_destination(dst, one_file, overwrite)  # again, because only now it is locked
            check_space(dst.parent, nbytes, _allocated(work.out_dir))
            work.out_dir.mkdir(parents=True, exist_ok=True)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError) and not isinstance(error, DestinationError):
                raise cannot_write(dst, error) from error
            raise
        return work

    def __enter__(self) -> WorkDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A run that was refused before it journaled any work must not keep reserved disk space. A
        # failure to remove it is ignored: the output is published, or another error is on its way.
        with contextlib.suppress(OSError):
            if self.path.exists() and (isinstance(error, DestinationError) or error is None):
                self._drop_if_nothing_done()
        with contextlib.suppress(OSError):
            self._lock.release()

    def _drop_if_nothing_done(self) -> None:
        journals = self.path.glob("journal*.jsonl")  # one for each rank
        if all(journal.read_bytes().count(b"\n") <= 1 for journal in journals):
            _discard(self.path)

    def discard(self) -> None:
        """Remove the work directory, because another plan replaces this one."""
        _discard(self.path)

    def publish(self, sync: bool = True) -> None:
        """Sync all files, then move the output to the destination by one rename.

        Without `sync` other processes still see all of it or nothing, but after a power cut some
        files may be incomplete. Raises DestinationError CKM301 if something appeared at the
        destination meanwhile, RunError CKM306 if syncing or renaming fails: then the work is kept,
        and the destination is as it was.
        """
        content = self.out_dir
        try:
            if self.one_file:
                (content,) = self.out_dir.iterdir()
            if sync:
                sync_tree(self.out_dir)
            marker = self.path / "publishing"
            marker.write_text(str(content.lstat().st_ino))
            if sync:
                for file in (marker, self.path):
                    _sync(file)
            self._rename(content)
            if sync:
                _sync(self.dst.parent)
        except DestinationError:
            raise
        except OSError as error:
            failed = RunError(
                "CKM306",
                f"{self.dst}: cannot be published: {error.strerror}",
                "repair the disk or its mount, then run the same command again to continue",
            )
            raise or_resource_error(error, failed) from error
        try:
            _discard(self.path)
        except OSError as error:
            self.notes += (f"{error.filename}: could not be removed; delete it",)

    def _rename(self, content: Path) -> None:
        check_destination(self.dst, self.one_file, self.overwrite)
        if self.overwrite and os.path.lexists(self.dst):
            if not _renameat2(content, self.dst, _EXCHANGE):
                self._two_renames(content)
        elif not self.one_file:
            os.rename(content, self.dst)  # fails unless `dst` is absent or empty
        elif not _renameat2(content, self.dst, _NOREPLACE):
            os.link(content, self.dst)  # fails if `dst` exists, which a rename does not
            content.unlink()

    def _two_renames(self, content: Path) -> None:
        old = self.path / "old"
        os.rename(self.dst, old)
        try:
            os.rename(content, self.dst)
        except OSError:
            os.rename(old, self.dst)
            raise


# ------------------------------------------------------------------------------- recovery


def _recover(dst: Path, mine: Path) -> Iterator[str]:
    """Repair what killed runs left, and yield notes about it. The caller holds the lock."""
    pattern = re.compile(re.escape(f".{dst.name}.ckptmap-") + r"[0-9A-Za-z]{12}(\.done)?")
    for work in sorted(dst.parent.iterdir()):
        if not pattern.fullmatch(work.name) or work.is_symlink() or not work.is_dir():
            continue
        if work.suffix == _DONE:
            shutil.rmtree(work)
            continue
        old = work / "old"
        if old.exists() and not os.path.lexists(dst):
            os.rename(old, dst)
            _sync(dst.parent)
            yield f"{dst}: restored; a run was killed while it replaced it"
        elif _was_published(work, dst):
            _discard(work)
            yield _removed(work)
        elif old.exists():
            raise DestinationError(
                "CKM304",
                f"{dst}: appeared while {old} held what was there before a run was killed",
                f"move {dst} or {old} away, then run again",
            )
        if work != mine and work.exists():
            _discard(work)
            yield f"{work}: removed; left by another conversion that did not finish"
    (mine / "publishing").unlink(missing_ok=True)


def clear_published(dst: Path, plan_digest: str, sync: bool) -> Iterator[str]:
    """Remove the work directory of a run of this plan that was killed just after it published.

    Yields notes. Does nothing if another process holds the lock: that process removes it.
    """
    dst = Path(os.path.abspath(dst))  # noqa: PTH100 (as `WorkDirectory.open` names it)
    work = _work_path(dst, plan_digest)
    done = work.with_name(work.name + _DONE)
    if not (work.is_dir() or done.is_dir()):
        return
    try:
        lock = Lock(_lock_path(dst), dst)
    except (DestinationError, OSError):
        return
    try:
        if sync:
            _sync(dst.parent)
        if done.is_dir() and not done.is_symlink():
            shutil.rmtree(done)
        if not work.is_symlink() and _was_published(work, dst):
            _discard(work)
            yield _removed(work)
    except OSError as error:
        yield f"{error.filename}: could not be removed; delete it"
    finally:
        with contextlib.suppress(OSError):
            lock.release()


def _work_path(dst: Path, plan_digest: str) -> Path:
    return dst.parent / f".{dst.name}.ckptmap-{plan_digest[:12]}"


def _lock_path(dst: Path) -> Path:
    return dst.parent / f".{dst.name}.ckptmap-lock"


def _removed(work: Path) -> str:
    return f"{work}: removed; a run was killed just after it published"


def _discard(work: Path) -> None:
    """Remove a work directory. It is renamed first, because a next run would misread half of
    one."""
    done = work.with_name(work.name + _DONE)
    shutil.rmtree(done, ignore_errors=True)
    os.rename(work, done)
    shutil.rmtree(done)


def _was_published(work: Path, dst: Path) -> bool:
    try:
        return int((work / "publishing").read_text()) == os.lstat(dst).st_ino
    except (FileNotFoundError, ValueError):
        return False


# --------------------------------------------------------------------------- system calls


def _files(directory: Path) -> Iterator[str]:
    for folder, _, names in os.walk(directory):
        yield from (os.path.join(folder, name) for name in names)


def _allocated(directory: Path) -> int:
    """Return the bytes of disk space that the files of a directory take."""
    return sum(os.lstat(file).st_blocks * 512 for file in _files(directory))


def sync_tree(path: Path) -> None:
    """Sync one file, or every file below a directory and then every directory, innermost first."""
    if not path.is_dir():
        _sync(path)
        return
    for file in _files(path):
        _sync(file)
    for folder, _, _ in os.walk(path, topdown=False):
        _sync(folder)


def _sync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """Rename with flags of renameat2(2).

    Returns False if the system or the filesystem does not support them. Raises DestinationError
    CKM301 if `new` exists and must not be replaced, OSError for other failures.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    if number == errno.EEXIST:
        raise DestinationError(
            "CKM301",
            f"{new}: appeared while it was written",
            "move it away, then run the same command again",
        )
    raise OSError(number, os.strerror(number), str(new))
