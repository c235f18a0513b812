"""A file that lies beside weights and goes along with them. One that is large, or on the Hub, is known
by its size and what tells its content until it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from ckptmap.storage.file_systems import MOUNTS, Fingerprint, local_copy

HELD_NBYTES = 1 << 20
"""A config is held from the plan on; what somebody registered with accelerate may be a second
model."""
PIECE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Sidecar:
    """Its `content`, or the `file` that it is elsewhere."""

    nbytes: int
    mark: str
    """Tells its content: the same on every machine."""
    content: bytes = b""
    file: str = ""

    @classmethod
    def at(cls, file: str) -> Sidecar:
        """A file as it is. Nothing of one that is elsewhere is fetched. Raises OSError."""
        found = Fingerprint.of(file)
        if MOUNTS.placeholder_of(file) is None and found.nbytes <= HELD_NBYTES:
            return cls.made(local_copy(file).read_bytes())
        return cls(found.nbytes, f"{found.nbytes} {found.mtime_ns}", file=file)

    @classmethod
    def made(cls, content: bytes) -> Sidecar:
        """One that is written for the output."""
        return cls(len(content), hashlib.sha256(content).hexdigest(), content)

    def read(self) -> bytes:
        """Raises OSError, and RunError CKM702 to 710 where it cannot be fetched."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The content, a piece at a time. Raises as `read` does."""
        if not self.file:
            yield self.content
            return
        with local_copy(self.file).open("rb") as stream:
            while piece := stream.read(PIECE_NBYTES):
                yield piece
