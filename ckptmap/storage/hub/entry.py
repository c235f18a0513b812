"""One file of a Hugging Face repository: its path, size and hash, to compare with a local file."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """A file in the tree of a repository.

    sha256     its hash if it is stored by LFS or xet, else None
    git_sha1   the hash of its Git blob (for LFS that of the pointer)
    xet        whether the Hub stores it on xet
    """

    path: str
    nbytes: int
    sha256: str | None
    git_sha1: str
    xet: bool = field(default=False, compare=False)

    @property
    def digest(self) -> str:
        return self.sha256 or self.git_sha1

    def is_in(self, file: str | Path) -> bool:
        """Return True if the local file has the size and hash of this one."""
        if os.stat(file).st_size != self.nbytes:
            return False
        with Path(file).open("rb") as stream:
            if self.sha256 is not None:
                return hashlib.file_digest(stream, "sha256").hexdigest() == self.sha256
            return git_sha1(stream.read()) == self.git_sha1


def git_sha1(data: bytes) -> str:
    """Return Git's hash of a file with this content: SHA-1 over `blob SIZE\\0` and the bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
