"""One file of a repository: its path, size and hash, and whether a local file is the same."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """A file of the tree: `sha256` where it is stored as LFS or xet, else Git's own SHA-1."""

    path: str
    nbytes: int
    sha256: str | None
    git_sha1: str
    xet: bool = field(default=False, compare=False)

    @property
    def digest(self) -> str:
        return self.sha256 or self.git_sha1

    def is_in(self, file: str | Path) -> bool:
        """Return True if the local file has this size and hash."""
        if os.stat(file).st_size != self.nbytes:
            return False
        with Path(file).open("rb") as stream:
            if self.sha256 is not None:
                return hashlib.file_digest(stream, "sha256").hexdigest() == self.sha256
            return git_sha1(stream.read()) == self.git_sha1


def git_sha1(data: bytes) -> str:
    """Return Git's hash of a file with this content: SHA-1 over `blob SIZE\\0` and the bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
