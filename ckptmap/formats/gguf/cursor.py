"""Read numbers and texts of a GGUF header one after the other, each within the file, through a small window."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ckptmap.core.printable import one_line
from ckptmap.errors import SourceError
from ckptmap.storage.files import Files

FIRST_NBYTES, WINDOW_NBYTES = 1 << 16, 1 << 20
"""Bytes of the first window and of the largest: each is twice the one before, so that little is read behind a header."""
MAGIC = b"GGUF"
MAX_KEY_NBYTES = 65535
"""Longest key of metadata (docs/gguf.md of ggml)."""
MAX_TEXT_NBYTES = 16 << 20
"""Longest text that is read: chat templates have 100 KB."""
AGAIN = "copy or download it again"
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of texts, of which only their number is kept."""

    count: int


class Cursor:
    """A place in a file, from which reads move on. `what` names what is read, for errors."""

    def __init__(self, files: Files, file: str, nbytes: int) -> None:
        self.files, self.file, self.nbytes = files, file, nbytes
        self.offset = 0
        self.what = "the header"
        self._window = b""
        self._begin = 0
        self._next_nbytes = FIRST_NBYTES

    @property
    def left(self) -> int:
        """Return how many bytes of the file follow."""
        return self.nbytes - self.offset

    def malformed(self, problem: str) -> SourceError:
        """Return SourceError CKM119 for what is read."""
        text = f"{self.file}: {one_line(self.what)}: {one_line(problem)}"
        return SourceError("CKM119", text, f"{AGAIN}, or ask its author to write it again")

    def truncated(self, wanted: int) -> SourceError:
        return SourceError(
            "CKM104",
            f"{self.file}: truncated, expected {wanted} bytes of {one_line(self.what)} at byte"
            f" {self.offset}, found {self.left}",
            AGAIN,
        )

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes. Raise SourceError CKM104 where the file ends before."""
        if nbytes > self.left:
            raise self.truncated(nbytes)
        at = self.offset - self._begin
        if at < 0 or at + nbytes > len(self._window):
            self._begin, at = self.offset, 0
            length = min(self.left, max(nbytes, self._next_nbytes))
            self._next_nbytes = min(2 * self._next_nbytes, WINDOW_NBYTES)
            self._window = self.files.read(self.file, self.offset, length)
        self.offset += nbytes
        return self._window[at : at + nbytes]

    def skip(self, nbytes: int) -> None:
        if nbytes > self.left:
            raise self.truncated(nbytes)
        self.offset += nbytes

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def text(self, most: int = MAX_TEXT_NBYTES) -> str:
        """Return a text of at most so many bytes. Raise SourceError CKM119 where it is no UTF-8."""
        nbytes = self.u64()
        if nbytes > self.left:
            raise self.truncated(nbytes)
        if nbytes > most:
            raise self.malformed(f"expected a text of at most {most} bytes, found {nbytes}")
        try:
            return self.take(nbytes).decode()
        except UnicodeDecodeError as error:
            raise self.malformed(f"expected text in UTF-8, found {error.reason}") from error

    def texts(self, count: int) -> Texts:
        """Skip so many texts, of which each has at least the 8 bytes of its length."""
        if count > self.left // 8:
            raise self.truncated(count * 8)
        for _ in range(count):
            self.skip(self.u64())
        return Texts(count)
