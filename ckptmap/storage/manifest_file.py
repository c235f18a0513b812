"""Read the manifest of an output of ckptmap, and let the digests in it count as stated checksums.

`ckptmap.execution.manifest` says what a manifest holds, and writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptmap.core.json_text import parse_json
from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Fingerprint, Mounts
from ckptmap.storage.manifest_schema import malformed
from ckptmap.tensors import StatedSum

SCHEMA = 1
SELF = "self"
_SELF_END = f',"{SELF}":"%s"}}'
SELF_END_NBYTES = len(_SELF_END % ("-" * 16))
"""The last bytes of every manifest: the digest of the bytes before them."""


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Return the manifest in `data`. Raises SourceError CKM403 if it is none, or of another version."""
    try:
        document = parse_json(data, allow_nan=True)
    except ValueError as error:
        raise SourceError(
            "CKM403",
            f"{where}: its manifest cannot be read as JSON: {error}",
            "convert the source again",
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise SourceError(
            "CKM403",
            f"{where}: manifest schema {schema!s:.40}, expected {SCHEMA}",
            "use the release of ckptmap that wrote it",
        )
    place = malformed(document)
    if place:
        raise SourceError(
            "CKM403",
            f"{where}: its manifest is damaged at {place}, expected what ckptmap writes",
            "convert the source again",
        )
    if SELF in document and not data.endswith(self_end(memoryview(data)[:-SELF_END_NBYTES])):
        raise SourceError(
            "CKM403",
            f"{where}: its manifest is damaged: its bytes do not have the xxh3 {document[SELF]}"
            " that it states of itself",
            "convert the source again",
        )
    return document


def self_end(body: bytes | memoryview) -> bytes:
    """Return the end of the manifest that begins with `body`: its digest, and the last brace."""
    from xxhash import xxh3_64_hexdigest

    return (_SELF_END % xxh3_64_hexdigest(body)).encode()


def state_chunks(manifest: Path, mounts: Mounts) -> None:
    """Let the digests of the chunks that a manifest lists count as stated by the files beside it.

    Files that state checksums of their own keep those. Raise SourceError CKM403 where the manifest
    is damaged, CKM101 where it cannot be read.
    """
    try:
        data = mounts.local_copy(manifest).read_bytes()
    except OSError as error:
        raise SourceError(
            "CKM101",
            f"{manifest}: cannot be read: {error.strerror}",
            "check the path and its permissions",
        ) from error
    document = parse(data, str(manifest))
    rows: dict[str, list[StatedSum]] = {}
    for tensor in document["tensors"].values():
        for name, offset, nbytes, _, _, digest in tensor["chunks"]:
            if digest:
                rows.setdefault(name, []).append(StatedSum(offset, nbytes, digest))
    for name, sums in rows.items():
        file, written = str(manifest.parent / name), document["files"].get(name, {}).get("nbytes")
        # A file of another size is not the one that the manifest lists: another program wrote it.
        if file not in mounts.stated and _nbytes(file, mounts) == written:
            mounts.state(file, sums)


def _nbytes(file: str, mounts: Mounts) -> int | None:
    """Return the size of a file; None where it is missing, which whoever reads it will say."""
    try:
        return Fingerprint.of(file, mounts).nbytes
    except OSError:
        return None
