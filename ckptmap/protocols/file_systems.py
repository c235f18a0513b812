"""Where the bytes of a source file come from: the local disk, or a file system that is mounted.

A checkpoint that is not on the local disk (a repository on the Hugging Face Hub, the tensors of a
live run) is given a directory of its own. The directory holds placeholders: files with their names
and sizes, but without content. A `FileSystem` answers for what lies below that directory, and a
`Mounts` table says which file system answers for which directory. There is no table of the process:
whoever opens a checkpoint makes one, and hands it to all that read for it:

    /tmp/ckptmap-hub-x/Llama-3.2-1B/model.safetensors  ->  the mirror of the repository
    /data/model.safetensors                            ->  None: the local disk

An object store would be one more class here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from ckptmap.tensors import StatedSum, Sum


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that a file is still the one that was planned on: size, mtime and inode.

    The ctime is not part of it: a hard link or a mode that a backup sets changes the ctime, and then
    no saved plan would hold any more. What a killed run wrote is kept only with the same ctime: see
    `storage.source_changes.file_states`.
    """

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: str, mounts: Mounts) -> Fingerprint:
        """Return the fingerprint of a file, local or mounted. Raise OSError where it is not there."""
        mounted = mounts.file_system_of(file)
        known = None if mounted is None else mounted.fingerprint(file)
        if known is not None:
            return known
        stat = os.stat(file)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class FileSystem(Protocol):
    """Answers for the placeholders below one directory. Its errors are SourceError or RunError."""

    origin: str
    """The directory's name in messages: what the user wrote for it."""

    def fingerprint(self, file: str) -> Fingerprint | None:
        """Return what identifies the content; None: `file` is not a placeholder."""

    def held(self, file: str) -> str | None:
        """Return the path of a whole, verified local copy; None: there is none yet."""

    def fetch(self, file: str) -> str:
        """Make a whole, verified local copy, and return its path."""

    def fetch_all(self, files: Sequence[str], into: Path | None) -> None:
        """Make local copies of all these files, in the caller's directory `into` if it is given."""

    def discard(self, file: str) -> None:
        """Remove the copy that `fetch_all` made in the caller's directory; others stay."""

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers from byte `offset` on, without a whole copy."""

    def close(self) -> None:
        """Remove what the file system keeps on the local disk."""


def require_regular(file: str | Path) -> None:
    """Raise OSError for a FIFO, device or socket: opening one may wait for ever. A missing file and
    a directory are left to whoever opens them."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "is no regular file", str(file))


@dataclass(frozen=True, slots=True)
class OwnManifest:
    """A manifest of ckptmap that was found, and of which nothing is compared yet.

    file    the manifest, or the one-file output that holds it
    read    returns the manifest inside `file`; None: `file` is the manifest
    spans   returns (offset, nbytes) of the parts of `file` that no digest covers, as
            `Index.manifest_spans` does; None: no digest of the bytes around its tensors is compared
    """

    file: str
    read: Callable[[], bytes] | None = None
    spans: Callable[[], Sequence[tuple[int, int]]] | None = None


class Mounts:
    """The file systems that are mounted, by directory. False where none is.

    Also holds the checksums that readers find stated in the files: `SourceSums` compares them.
    """

    def __init__(self) -> None:
        self._by_root: dict[str, FileSystem] = {}  # replaced, not changed: other threads read it
        self.stated: dict[str, list[StatedSum]] = {}
        """File -> the checksums that it states for runs of its bytes, in any order."""
        self.manifests: list[OwnManifest] = []
        """Manifests of ckptmap whose digests are not among them yet: see `SourceSums`."""

    def __bool__(self) -> bool:
        return bool(self._by_root)

    def __iter__(self) -> Iterator[FileSystem]:
        return iter(self._by_root.values())

    def state(self, file: str, sums: Iterable[tuple[int, int, Sum]]) -> None:
        """Note checksums that a file states, each (offset, nbytes, checksum)."""
        self.stated.setdefault(file, []).extend(map(StatedSum._make, sums))

    def mount(self, directory: str, file_system: FileSystem) -> None:
        """Let `file_system` answer for all files below `directory`, an absolute path."""
        self._by_root = {**self._by_root, directory.rstrip("/") + "/": file_system}

    def close(self) -> None:
        """Unmount all, and remove what they keep on the local disk."""
        before, self._by_root = self._by_root, {}
        for file_system in before.values():
            file_system.close()

    def file_system_of(self, file: str) -> FileSystem | None:
        """Return the file system that answers for a file; None: the local disk."""
        for root, file_system in self._by_root.items():
            if file.startswith(root):
                return file_system
        return None

    def placeholder_of(self, file: str) -> FileSystem | None:
        """Return the same, but None also for what lies in a mount and is no placeholder."""
        mounted = self.file_system_of(file)
        return None if mounted is None or mounted.fingerprint(file) is None else mounted

    def local_copy(self, file: str | Path) -> Path:
        """Return a local path from which all bytes of a file can be read: its own, or a copy's.

        Raise RunError where the copy cannot be fetched, OSError where it is no regular file: who
        opens a FIFO waits for its writer.
        """
        mounted = self.placeholder_of(str(file))
        if mounted is None:
            require_regular(file)
            return Path(file)
        return Path(mounted.held(str(file)) or mounted.fetch(str(file)))

    def read_head(self, file: str | Path, nbytes: int) -> bytes:
        """Return the first bytes of a file, at most `nbytes`; of a mounted file only these are read.

        Raise OSError where the file cannot be read, RunError where they cannot be fetched.
        """
        mounted = self.placeholder_of(str(file))
        copy = file if mounted is None else mounted.held(str(file))
        if mounted is None or copy is not None:
            assert copy is not None
            require_regular(copy)
            with Path(copy).open("rb") as stream:
                return stream.read(nbytes)
        first = bytearray(min(nbytes, Fingerprint.of(str(file), self).nbytes))
        if first:
            mounted.read_into(str(file), 0, [memoryview(first)])
        return bytes(first)

    def with_origins(self, text: str) -> str:
        """Return a message in which mounted directories have the names that the user gave."""
        for root, file_system in self._by_root.items():
            text = text.replace(root, file_system.origin + "/")
            text = text.replace(root[:-1], file_system.origin)
        return text


class ReadsFiles:
    """A base class of adapters that read files which no argument of their methods opens for them.

    A scheme reads the scales in a small tensor, a carrier the config.json beside the weights. Their
    caller gives them the mounts by `through`. Without mounts, as when a method is called on the
    registered adapter itself, all files are local.
    """

    _mounts: Mounts | None = None

    @property
    def mounts(self) -> Mounts:
        """The file systems to read through."""
        return Mounts() if self._mounts is None else self._mounts

    def through(self, mounts: Mounts) -> Self:
        """Return the same adapter, which reads its files through these mounts."""
        adapter = copy(self)
        object.__setattr__(adapter, "_mounts", mounts)  # some adapters are frozen
        return adapter


T = TypeVar("T")


def through(adapter: T, mounts: Mounts) -> T:
    """Return the adapter as it reads files through these mounts; one that reads none stays itself."""
    return adapter.through(mounts) if isinstance(adapter, ReadsFiles) else adapter
