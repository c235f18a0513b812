"""Read the manifest of an output of ckptmap, and let the digests in it count as stated checksums.

`ckptmap.execution.manifest` says what a manifest holds, and writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, cast

from ckptmap.core.json_text import parse_json
from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Fingerprint, Mounts, OwnManifest
from ckptmap.storage.bytes_around import digest_around
from ckptmap.storage.file_records import AGAIN, without_manifest
from ckptmap.storage.manifest_schema import ManifestDocument, malformed
from ckptmap.storage.own_files import MANIFEST
from ckptmap.storage.resource_limits import unreadable
from ckptmap.tensors import StatedSum

SCHEMA = 1
AROUND: Final = "around"
NOT_TAKEN = "-" * 16
"""In place of a digest: the bytes around the tensors have none (yet)."""
SELF: Final = "self"
_SELF_END = f',"{SELF}":"%s"}}'
SELF_END_NBYTES = len(_SELF_END % ("-" * 16))
"""The last bytes of every manifest: the digest of the bytes before them."""


class ChunkRow(NamedTuple):
    """One chunk of a stored tensor, as the manifest lists it: `nbytes` bytes from byte `offset` of
    `file` on hold the box at `offsets` of `sizes` elements; `digest` is the xxh3 of these bytes, or ""."""

    file: str
    offset: int
    nbytes: int
    offsets: Sequence[int]
    sizes: Sequence[int]
    digest: str


def chunks_of(document: ManifestDocument) -> Iterator[tuple[str, ChunkRow]]:
    """Yield every chunk that a manifest lists, with the key of its tensor."""
    for key, entry in document["tensors"].items():
        for chunk in entry["chunks"]:
            yield key, ChunkRow(*chunk)


def parse(data: bytes, where: str) -> ManifestDocument:
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
    return cast(ManifestDocument, document)


def self_end(body: bytes | memoryview) -> bytes:
    """Return the end of the manifest that begins with `body`: its digest, and the last brace."""
    from xxhash import xxh3_64_hexdigest

    return (_SELF_END % xxh3_64_hexdigest(body)).encode()


def state_chunks(manifest: OwnManifest, mounts: Mounts) -> None:
    """Let the digests of the chunks that a manifest lists count as stated by the files beside it,
    and compare the bytes around the chunks.

    Files that state checksums of their own keep those.
    Raise SourceError CKM403 where the manifest is damaged, CKM105 where a file has another size or
    header than it lists, CKM101 where one of them cannot be read.
    """
    if manifest.read is not None:
        _check_one_file(manifest, _of_source(manifest.read(), manifest.file), mounts)
        return
    try:
        data = mounts.local_copy(manifest.file).read_bytes()
    except OSError as error:
        raise unreadable(manifest.file, error) from error
    document, folder = _of_source(data, manifest.file), Path(manifest.file).parent
    spans: dict[str, list[StatedSum]] = {name: [] for name in document["files"]}
    for _, chunk in chunks_of(document):
        spans.setdefault(chunk.file, []).append(_stated(chunk))
    for name, chunks in spans.items():
        file, entry = str(folder / name), document["files"].get(name)
        nbytes = _nbytes(file, mounts)
        if nbytes is None or file.endswith(
            ".json"
        ):  # people edit it; it states no more than it says
            continue
        way_out = f"{without_manifest(file)}; else {AGAIN}"
        stated = None if entry is None else entry["nbytes"]
        if entry is None or nbytes != stated:
            raise SourceError(
                "CKM105",
                f"{file}: has {nbytes} bytes, its {MANIFEST} states {stated}",
                way_out,
            )
        _check_around(file, entry.get(AROUND), [chunk[:2] for chunk in chunks], mounts, way_out)
        if file not in mounts.stated and any(chunk.sum for chunk in chunks):
            mounts.state(file, [chunk for chunk in chunks if chunk.sum])


def _stated(chunk: ChunkRow) -> StatedSum:
    return StatedSum(chunk.offset, chunk.nbytes, chunk.digest)


def _of_source(data: bytes, where: str) -> ManifestDocument:
    """Return the manifest of a source. Where it is damaged, the weights may be whole all the same."""
    try:
        return parse(data, where)
    except SourceError as error:
        error.change_hint(
            lambda hint: (
                "to take the weights as they are, add --check-source none"
                f' (in Python: check_source="none", or verify="none" of load); else {hint}'
            )
        )
        raise


def _check_one_file(manifest: OwnManifest, document: ManifestDocument, mounts: Mounts) -> None:
    """Raise SourceError CKM105 where a one-file output is not as it was written around its tensors.

    Where its format states no checksums (GGUF), the digests of its chunks count as stated.
    """
    chunks = [_stated(chunk) for _, chunk in chunks_of(document)]
    if manifest.file not in mounts.stated and any(chunk.sum for chunk in chunks):
        mounts.state(manifest.file, [chunk for chunk in chunks if chunk.sum])
    if manifest.spans is None or document.get(AROUND, NOT_TAKEN) == NOT_TAKEN:
        return
    spans = [chunk[:2] for chunk in chunks]
    way_out = (
        "if another program edited it after ckptmap, --check-source none converts what is there"
        f' (in Python: check_source="none", or verify="none" of load); else {AGAIN}'
    )
    spans += manifest.spans()
    _check_around(manifest.file, document[AROUND], spans, mounts, way_out)


def _check_around(
    file: str,
    expected: str | None,
    spans: Sequence[tuple[int, int]],
    mounts: Mounts,
    way_out: str,
) -> None:
    """Raise SourceError CKM105 where the header of a file is not the one that was written: a bit that
    is flipped in it can give a tensor another name. Files on the Hub have hashes.

    spans  (offset, nbytes) of what `expected` is no digest of
    """
    if expected in (None, NOT_TAKEN) or mounts.file_system_of(file) is not None:
        return
    offsets, sizes = [span[0] for span in spans], [span[1] for span in spans]
    try:
        with Path(file).open("rb") as stream:
            nbytes = os.fstat(stream.fileno()).st_size
            digest = digest_around(_Stream(stream), file, nbytes, offsets, sizes)
    except OSError as error:
        raise unreadable(file, error) from error
    if digest != expected:
        raise SourceError(
            "CKM105",
            f"{file}: its bytes around the tensors are damaged: expected xxh3 {expected}, as its"
            f" {MANIFEST} states, got {digest}",
            way_out,
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
