"""Lock a destination, so that only one process writes it: a lock file that names its owner.

The file appears complete (as a link to a finished file), so a reader never sees half of it. A lock
is taken over if its owner is dead: if the process on this host is gone, or if its number now
belongs to a younger process. A lock of another host is never taken over.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from ckptmap.core.json_text import parse_object
from ckptmap.errors import DestinationError

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

    Raises DestinationError CKM305 if another process holds it, OSError if the directory cannot be
    written.
    """

    def __init__(self, path: Path, what: Path) -> None:
        self.path = path
        self.owner = Owner.this()
        _sweep(path)
        # The name has the owner too: a process killed before it writes leaves an empty file.
        who = self.owner
        made = path.with_name(f"{path.name}.{who.host}.{who.pid}.{who.start}.{who.token}")
        made.write_text(json.dumps(asdict(self.owner)))
        try:
            self._take(made, what)
        finally:
            made.unlink(missing_ok=True)

    def _take(self, made: Path, what: Path) -> None:
        for _ in range(ATTEMPTS):
            if _link(made, self.path):
                return
            owner = read_owner(self.path)
            if owner is None:
                time.sleep(0.01)  # just released, or being written on a filesystem without links
            elif not owner.is_gone:
                raise _held(what, owner, self.path)
            elif _replace(made, self.path, owner):
                return
        raise DestinationError(
            "CKM305",
            f"{what}: its lock {self.path} names no process that can be checked",
            "if nothing writes there, delete that file and run again",
        )

    def release(self) -> None:
        if read_owner(self.path) == self.owner:
            self.path.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove the files of processes that were killed while they took the lock."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*"):
        host, *numbers = left.name.removeprefix(f"{path.name}.").rsplit(".", 3)
        if len(numbers) == 3 and numbers[0].isdigit() and numbers[1].isdigit():
            owner = Owner(host, int(numbers[0]), int(numbers[1]), numbers[2])
            if owner.is_gone:
                left.unlink(missing_ok=True)


def read_owner(path: Path) -> Owner | None:
    """Return the owner of a lock; None if there is no lock file, or if it cannot be read."""
    try:
        value = parse_object(path.read_bytes())
        host, pid, start, token = (value[name] for name in ("host", "pid", "start", "token"))
    except (OSError, ValueError, KeyError):
        return None
    if isinstance(host, str) and isinstance(pid, int) and isinstance(start, int):
        return Owner(host, pid, start, str(token))
    return None


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
        with path.open("x") as handle:
            handle.write(made.read_text())
    except FileExistsError:
        return False
    return True


def _replace(made: Path, path: Path, stale: Owner) -> bool:
    """Replace a stale lock by ours. Return False if another process was faster.

    All who try lock the stale file itself (flock): the second one then finds another file there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if read_owner(path) != stale or os.fstat(fd).st_ino != path.stat().st_ino:
            return False
        made.replace(path)
        return True
    except FileNotFoundError:
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
