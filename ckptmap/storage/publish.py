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
the same plan, unless that could not continue it (`operations/workspace`). The next `WorkDirectory.open` takes the lock and repairs what a killed run left
(`recover`). Nothing in these files is trusted: see `own_files` and `listing`. Where the file system
cannot rename a directory, the files are moved one by one: see `publish_by_marker`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from ckptmap.errors import CkptmapError, DestinationError, RunError
from ckptmap.storage.destination import cannot_write, check_destination, check_space
from ckptmap.storage.listing import require_listing
from ckptmap.storage.locks import Lock
from ckptmap.storage.own_files import own_directory, read_plain, require_own_tree
from ckptmap.storage.publish_by_marker import (
    OLD,
    file_rename_problem,
    is_pending,
    note,
    note_inode,
    publish_by_marker,
    rename_problem,
)
from ckptmap.storage.recover import discard, lock_path, recover, sweep, work_path
from ckptmap.storage.resource_limits import or_resource_error
from ckptmap.storage.sync import files_below, sync_tree
from ckptmap.storage.sync import sync as sync_one

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
        self._no_rename = ""
        """Why directories cannot be renamed here; "" where they can."""

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
        if not is_pending(dst):
            _check_free(dst, one_file, overwrite)
        try:
            dst.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock(lock_path(dst), dst)
        except DestinationError:
            raise
        except OSError as error:
            raise cannot_write(dst, error) from error
        try:
            work = cls(dst, work_path(dst, plan_digest), one_file, overwrite, lock)
            work._begin(nbytes)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError) and not isinstance(error, DestinationError):
                raise cannot_write(dst, error) from error
            raise
        return work

    def _begin(self, nbytes: int) -> None:
        """Repair, check and make the directories. The lock is held."""
        dst, path, uid = self.dst, self.path, self._lock.uid
        self.notes = tuple(recover(dst, path, uid))
        check_destination(dst, self.one_file, self.overwrite)  # again: only now it is locked
        check_space(dst.parent, nbytes, _allocated(self.out_dir))
        if dst.is_dir() and dst.stat().st_dev != dst.parent.stat().st_dev:
            check_space(dst, nbytes)  # another file system is mounted there: files are copied to it
        own_directory(path, uid)
        own_directory(self.out_dir, uid)
        require_own_tree(path, uid)
        if not self.one_file:
            self._no_rename = rename_problem(path, self.out_dir, dst)
        elif problem := file_rename_problem(path):
            discard(path)
            raise DestinationError(
                "CKM304",
                f"{dst}: cannot be written: its file system cannot rename a file ({problem})",
                "choose a destination on another file system",
            )

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
                self.drop_if_nothing_done()
        with contextlib.suppress(OSError):
            self._lock.release()
        if isinstance(error, CkptmapError) and os.path.lexists(self.path):
            error.keep_work()

    def drop_if_nothing_done(self) -> None:
        """Remove the work directory where no rank has journaled a unit of work."""
        journals = self.path.glob("journal*.jsonl")  # one for each rank
        if all((read_plain(journal) or b"").count(b"\n") <= 1 for journal in journals):
            discard(self.path)

    def discard(self) -> None:
        """Remove the work directory, because another plan replaces this one."""
        discard(self.path)

    def refuse_strangers(self, files: Collection[str]) -> None:
        """Raise RunError CKM401 for a file in `out_dir` that is none of `files`, DestinationError CKM304
        where it cannot be listed."""
        try:
            require_listing(self.out_dir, files, complete=False)
        except OSError as error:
            raise cannot_write(self.dst, error) from error

    def publish(self, files: Collection[str], sync: bool = True) -> None:
        """Sync all files, then move the output to the destination by one rename.

        `files` are the names of all files of the output: there must be these and no others.
        Without `sync` other processes still see all of it or nothing, but after a power cut some
        files may be incomplete. Where directories cannot be renamed, files are moved one by one.

        Raises RunError CKM401 where `out_dir` holds other files, DestinationError CKM301 if
        something appeared at the destination meanwhile, RunError CKM306 if syncing or renaming
        fails: then the work is kept, and the destination is as it was.
        """
        content = self.out_dir
        try:
            require_listing(content, files, complete=True)
            if self.one_file:
                (content,) = self.out_dir.iterdir()
            if sync:
                sync_tree(self.out_dir)
            if self._no_rename:
                self._move_files(files, sync)
            else:
                self._rename_marked(content, sync)
            if sync:
                sync_one(self.dst.parent)
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
            discard(self.path, sync)
        except OSError as error:
            self.notes += (f"{error.filename}: could not be removed; delete it",)

    def _move_files(self, files: Collection[str], sync: bool) -> None:
        check_destination(self.dst, self.one_file, self.overwrite)
        publish_by_marker(self.out_dir, self.dst, files, sync)
        self.notes += (note(self.dst, self._no_rename),)

    def _rename_marked(self, content: Path, sync: bool) -> None:
        note_inode(self.path, content, sync)
        self._rename(content)

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
        old = self.path / OLD
        os.rename(self.dst, old)
        try:
            os.rename(content, self.dst)
        except OSError:
            os.rename(old, self.dst)
            raise


def _check_free(dst: Path, one_file: bool, overwrite: bool) -> None:
    try:
        check_destination(dst, one_file, overwrite)
    except DestinationError:
        sweep(dst)
        raise


# --------------------------------------------------------------------------- system calls


def _allocated(directory: Path) -> int:
    """Return the bytes of disk space that the files of a directory take; 0 if it is missing."""
    if not directory.exists():
        return 0
    return sum(os.lstat(file).st_blocks * 512 for file in files_below(directory))


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
