"""The manifest that ckptmap puts behind the tensors of a GGUF file that it writes.

    header, tensors, padding     as every GGUF file has them; readers stop here
    manifest                     JSON, from the end of the padding on
    u64 bytes of the manifest, "ckptmap\\n"

llama.cpp and the `gguf` package read tensors by their offsets and take no notice of what follows.
"""

from __future__ import annotations

import struct

from ckptmap.errors import SourceError
from ckptmap.formats.gguf.cursor import AGAIN
from ckptmap.formats.gguf.header import GgufHeader
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.storage.files import Files

_END = struct.Struct("<Q8s")
_MARK = b"ckptmap\n"


def end_of(manifest: bytes) -> bytes:
    """Return what follows a manifest."""
    return _END.pack(len(manifest), _MARK)


def manifest_span(files: Files, header: GgufHeader) -> tuple[int, int] | None:
    """Return (offset, nbytes) of the manifest in a file; None where it has none.

    Raise SourceError CKM119 where the file states one of another size than it has room for.
    """
    file = header.file
    room = Fingerprint.of(file, files.mounts).nbytes - header.end - _END.size
    if room < 0:
        return None
    nbytes, mark = _END.unpack(files.read(file, header.end + room, _END.size))
    if mark != _MARK:
        return None
    if nbytes != room:
        raise SourceError(
            "CKM119", f"{file}: its manifest: expected {room} bytes, found {nbytes} stated", AGAIN
        )
    return header.end, room
