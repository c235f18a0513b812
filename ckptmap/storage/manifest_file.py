"""Read the manifest of an output of ckptmap, and let the digests in it count as stated checksums.

`ckptmap.execution.manifest` says what a manifest holds, and writes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ckptmap.core.json_text import parse_json
from ckptmap.errors import CkptmapError, SourceError
from ckptmap.protocols.file_systems import Fingerprint, Mounts
from ckptmap.storage.bytes_around import digest_around
from ckptmap.storage.file_records import AGAIN, without_manifest
from ckptmap.storage.manifest_schema import malformed
from ckptmap.storage.own_files import MANIFEST
from ckptmap.storage.resource_limits import or_resource_error
from ckptmap.tensors import StatedSum

SCHEMA = 1
AROUND = "around"
NOT_TAKEN = "-" * 16
"""In place of a digest: the bytes around the tensors have none (yet)."""
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
    is damaged, CKM105 where the header of a file is not the one that it lists, CKM101 where one
    of them cannot be read.
    """
    try:
        data = mounts.local_copy(manifest).read_bytes()
    except OSError as error:
        raise _unreadable(manifest, error) from error
    document = parse(data, str(manifest))
    spans: dict[str, list[StatedSum]] = {name: [] for name in document["files"]}
    for tensor in document["tensors"].values():
        for name, offset, nbytes, _, _, digest in tensor["chunks"]:
            spans.setdefault(name, []).append(StatedSum(offset, nbytes, digest))
    for name, chunks in spans.items():
        file, entry = str(manifest.parent / name), document["files"].get(name, {})
        # A file of another size is not the one that the manifest lists: another program wrote it.
        if _nbytes(file, mounts) != entry.get("nbytes"):
            continue
        _check_around(file, entry, chunks, mounts)
        if file not in mounts.stated and any(chunk.sum for chunk in chunks):
            mounts.state(file, [chunk for chunk in chunks if chunk.sum])


def _check_around(
    file: str, entry: Mapping[str, Any], chunks: Sequence[StatedSum], mounts: Mounts
) -> None:
    """Raise SourceError CKM105 where the header of a file is not the one that was written: a bit that
    is flipped in it can give a tensor another name.

    A file of JSON, which people edit, states no more than it says. Files on the Hub have hashes.
    """
    expected = entry.get(AROUND, NOT_TAKEN)
    if expected == NOT_TAKEN or file.endswith(".json") or mounts.file_system_of(file) is not None:
        return
    offsets, sizes = [chunk.offset for chunk in chunks], [chunk.nbytes for chunk in chunks]
    try:
        with Path(file).open("rb") as stream:
            digest = digest_around(_Stream(stream), file, entry["nbytes"], offsets, sizes)
    except OSError as error:
        raise _unreadable(file, error) from error
    if digest != expected:
        raise SourceError(
            "CKM105",
            f"{file}: its bytes around the tensors are damaged: expected xxh3 {expected}, as"
            f" {MANIFEST} beside it states, got {digest}",
            f"{without_manifest(file)}; else {AGAIN}",
        )


def _unreadable(file: str | Path, error: OSError) -> CkptmapError:
    problem = f"{file}: cannot be read: {error.strerror}"
    return or_resource_error(
        error, SourceError("CKM101", problem, "check the path and its permissions")
    )


@dataclass(frozen=True)
class _Stream:
    """One open file, read as `Files` reads."""

    stream: BinaryIO

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        return os.pread(self.stream.fileno(), nbytes, offset)


def _nbytes(file: str, mounts: Mounts) -> int | None:
    """Return the size of a file; None where it is missing, which whoever reads it will say."""
    try:
        return Fingerprint.of(file, mounts).nbytes
    except OSError:
        return None
