"""Lock a destination, so that only one process writes it: a lock file that names its owner.

The file appears complete (as a link to a finished file), so a reader never sees half of it. A lock
is taken over if its owner is dead: if the process on this host is gone, or if its number now
belongs to a younger process. A lock of another host is never taken over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptmap.core.json_text import parse_object
from ckptmap.core.printable import quote
from ckptmap.errors import DestinationError
from ckptmap.storage.own_files import create, open_plain, read_plain

ATTEMPTS = 100
"""How often taking the lock is tried again if other processes take and release it meanwhile."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    start   its start time in clock ticks since boot; 0: unknown
    token   a random text, which tells two locks of one process apart
    """

    host: str
    pid: int
    start: int
    token: str

    @classmethod
    def this(cls) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _start_time(pid) or 0, uuid.uuid4().hex)

    @property
    def is_gone(self) -> bool:
        if self.host != socket.gethostname():
            return False
        start = _start_time(self.pid)
        return start is None or (0 not in (start, self.start) and start != self.start)


class Lock:
    """A lock on `what` with the lock file `path`, held until `release`.

    Raises DestinationError CKM305 if another process holds it, CKM304 if the lock file is a link or
    no file, OSError if the directory cannot be written.
    """

    def __init__(self, path: Path, what: Path) -> None:
        self.path = path
        self.owner = Owner.this()
        _sweep_candidates(path)
        # The name has the owner too: a process killed before it writes leaves an empty file.
        who = self.owner
        made = path.with_name(f"{path.name}.{who.host}.{who.pid}.{who.start}.{who.token}")
        _taking.add(who.token)
        try:
            create(made, [json.dumps(asdict(who)).encode()])
            self.uid = os.lstat(made).st_uid
            """Our user id on this file system: a server may map it to another one."""
            self._written_at = _written_at(made)
            self._take(made, what)
        finally:
            # Where it fails, the next run sweeps it; the lock must not be lost for that.
            with contextlib.suppress(OSError):
                made.unlink()
            _taking.discard(who.token)

    def _take(self, made: Path, what: Path) -> None:
        for _ in range(ATTEMPTS):
            if _link(made, self.path):
                return
            content = _content(self.path)
            owner = None if content is None else _parsed(content)
            if content is not None and (_is_released(content) or (owner and owner.is_gone)):
                if _replace(made, self.path, content):
                    return
            elif owner is not None:
                raise _held(what, owner, self.path)
            time.sleep(0.01)  # just released, or being written on a filesystem without links
        raise DestinationError(
            "CKM305",
            f"{what}: its lock {self.path} names no process that can be checked",
            f"if nothing writes there, delete it, then run again: rm {quote(str(self.path))}",
        )

    def release(self) -> None:
        """Remove the lock file. Where that fails, write into it that it is free: the next run takes
        it then. Raises nothing, because the output is published or another error is on its way."""
        with contextlib.suppress(OSError):
            if not self._is_ours():
                return
            try:
                os.unlink(self.path)
            except OSError:
                _write_released(self.path)

    def _is_ours(self) -> bool:
        """Return whether the lock file is still ours. Raises OSError."""
        try:
            content = read_plain(self.path, linked=True, limit=_MAX_NBYTES)
        except DestinationError:
            return False
        except OSError:  # no descriptor is left, for example
            return _written_at(self.path) == self._written_at
        return content is not None and _parsed(content) == self.owner


_taking: set[str] = set()
"""Tokens of the locks that threads of this process are about to take: their files are not swept."""
_RELEASED = b'{"released": true}'
_MAX_NBYTES = 4096
"""The most bytes of a lock file that are read: one of ours has about 120."""
_CANDIDATE = re.compile(r"(.*)\.([0-9]{1,20})\.([0-9]{1,20})\.([0-9a-f]+)")


def sweep(path: Path, what: Path) -> None:
    """Remove the lock and the files beside it that killed processes left. Raises nothing."""
    with contextlib.suppress(OSError):
        _sweep_candidates(path)
        content = _content(path)
        owner = None if content is None else _parsed(content)
        if content is not None and (_is_released(content) or (owner and owner.is_gone)):
            Lock(path, what).release()


def _sweep_candidates(path: Path) -> None:
    """Remove the files of processes that were killed while they took the lock."""
    this = Owner.this()
    for left in path.parent.glob(f"{glob.escape(path.name)}.*"):
        match = _CANDIDATE.fullmatch(left.name.removeprefix(f"{path.name}."))
        if match is None:
            continue
        owner = Owner(match[1], int(match[2]), int(match[3]), match[4])
        mine = (owner.host, owner.pid, owner.start) == (this.host, this.pid, this.start)
        if owner.is_gone or (mine and owner.token not in _taking):
            with contextlib.suppress(OSError):
                left.unlink()


def read_owner(path: Path) -> Owner | None:
    """Return the owner of a lock; None if there is no lock file, or if it cannot be read.

    Raises DestinationError CKM304 if the lock file is a link or no file.
    """
    content = _content(path)
    return None if content is None else _parsed(content)


def _content(path: Path) -> bytes | None:
    try:
        # A process that takes the lock gives it two names for a moment; reading it is safe.
        return read_plain(path, linked=True, limit=_MAX_NBYTES)
    except DestinationError:
        raise
    except OSError:
        return None


def _parsed(content: bytes) -> Owner | None:
    try:
        value = parse_object(content)
        host, pid, start, token = (value[key] for key in ("host", "pid", "start", "token"))
    except (ValueError, KeyError):
        return None
    if type(pid) is not int or type(start) is not int or pid <= 0:  # bool is an int, too
        return None
    if not isinstance(host, str) or not isinstance(token, str):
        return None
    return Owner(host, pid, start, token)


def _is_released(content: bytes) -> bool:
    return content.rstrip() == _RELEASED


def _written_at(path: Path) -> tuple[int, int, int]:
    """Return the device, the inode and the time of the last write of a file: no other one has them."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _write_released(path: Path) -> None:
    """Overwrite a lock in place, with as many bytes as it has: that needs no space on the disk."""
    fd = open_plain(path, os.O_WRONLY, linked=True)
    try:
        os.pwrite(fd, _RELEASED.ljust(os.fstat(fd).st_size), 0)
    finally:
        os.close(fd)


def _held(what: Path, owner: Owner, path: Path) -> DestinationError:
    return DestinationError(
        "CKM305",
        f"{what}: is being written by pid {owner.pid} on host {owner.host}",
        f"wait for it; if it is gone, delete {quote(str(path))}",
    )


def _link(made: Path, path: Path) -> bool:
    """Create `path` with the content of `made` in one step. Return False if it exists."""
    try:
        os.link(made, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        return _create(made, path)
    return True


def _create(made: Path, path: Path) -> bool:
    """Create `path` with the content of `made`, on a filesystem without hard links.

    Returns False if it exists. For a moment other processes can see it empty.
    """
    try:
        create(path, [made.read_bytes()])
    except FileExistsError:
        return False
    return True


def _replace(made: Path, path: Path, stale: bytes) -> bool:
    """Replace a stale lock by ours. Return False if another process was faster.

    All who try lock the stale file itself (flock): the second one then finds another file there.
    """
    try:
        fd = open_plain(path, os.O_RDONLY, linked=True)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _content(path) != stale or os.fstat(fd).st_ino != os.lstat(path).st_ino:
            return False
        made.replace(path)
        return True
    except (FileNotFoundError, BlockingIOError):
        return False
    finally:
        os.close(fd)


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; 0: unknown; None: no such
    process.

    A zombie (a process that has ended, but whose parent has not waited for it) counts as none.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    try:
        # By proc(5) the name in parentheses may hold any text; the state is field 3, the start 22.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return None if fields[0] == "Z" else int(fields[19])
