"""A file that lies beside weights and goes along with them. One that is on the Hub is known by its
size and hash until it is written."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ckptmap.files import Fingerprint, backing_of, whole


@dataclass(frozen=True)
class Sibling:
    """Its `content`, or the `file` that it is elsewhere."""

    nbytes: int
    mark: str
    """Tells its content: the same on every machine."""
    content: bytes = b""
    file: str = ""

    @classmethod
    def at(cls, file: str) -> Sibling:
        """A file as it is. Nothing of one that is elsewhere is fetched. Raises OSError."""
        backing = backing_of(file)
        if backing is None or backing.fingerprint(file) is None:
            return cls.made(whole(file).read_bytes())
        found = Fingerprint.of(file)
        return cls(found.nbytes, f"{found.nbytes} {found.mtime_ns}", file=file)

    @classmethod
    def made(cls, content: bytes) -> Sibling:
        """One that is written for the output."""
        return cls(len(content), hashlib.sha256(content).hexdigest(), content)

    def read(self) -> bytes:
        """Raises OSError, and RunError CKM702 to 710 where it cannot be fetched."""
        return whole(self.file).read_bytes() if self.file else self.content
