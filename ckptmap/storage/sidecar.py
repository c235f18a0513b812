"""A sidecar: a file beside the weights (config, tokenizer) that is copied to the output with them.

The content of a small one is read at plan time. A large one, or one on the Hub, is known by its size
and fingerprint until it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptmap.protocols.file_systems import Fingerprint, Mounts

HELD_NBYTES = 1 << 20
"""Largest sidecar whose content is in the plan. A config is far smaller; what a program registered with
accelerate may be a second model."""
PIECE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Sidecar:
    """One sidecar: its `content`, or the `file` that holds it."""

    nbytes: int
    mark: str
    """Identifies the content; for files on the Hub and small ones it is the same on every machine."""
    content: bytes = b""
    file: str = ""
    mounts: Mounts = field(default_factory=Mounts, repr=False, compare=False)
    """The file systems to read `file` through."""

    @classmethod
    def at(cls, file: str, mounts: Mounts) -> Sidecar:
        """Return the sidecar for a file. A file on the Hub is not fetched. Raise OSError."""
        fingerprint = Fingerprint.of(file, mounts)
        if mounts.placeholder_of(file) is None and fingerprint.nbytes <= HELD_NBYTES:
            return cls.made(mounts.local_copy(file).read_bytes())
        return cls(
            fingerprint.nbytes,
            f"{fingerprint.nbytes} {fingerprint.mtime_ns}",
            file=file,
            mounts=mounts,
        )

    @classmethod
    def made(cls, content: bytes) -> Sidecar:
        """Return a sidecar with this content, which is made for the output."""
        import hashlib

        return cls(len(content), hashlib.sha256(content).hexdigest(), content)

    def read(self) -> bytes:
        """Return the content. Raise OSError, and RunError CKM702 to 710 where it cannot be fetched."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield the content, at most PIECE_NBYTES bytes at a time. Raise as `read` does."""
        if not self.file:
            yield self.content
            return
        with self.mounts.local_copy(self.file).open("rb") as stream:
            while piece := stream.read(PIECE_NBYTES):
                yield piece
