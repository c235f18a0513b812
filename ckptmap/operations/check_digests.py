"""Compare the bytes of an output with the digests in its manifest: all of them, or a file's headers.

Each chunk of a tensor has a digest, and so have the bytes of each file around the chunks: headers,
zip directories, padding. A carried file has one of all its bytes. The manifest itself has one, which
is compared when it is parsed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.execution.phases import Phases
from ckptmap.operations.check_structure import nbytes_of
from ckptmap.protocols.file_systems import Mounts
from ckptmap.protocols.progress import HASHING
from ckptmap.storage.bytes_around import digest_around
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.files import Files
from ckptmap.storage.manifest_file import AROUND, NOT_TAKEN, SELF, ChunkRow, chunks_of
from ckptmap.storage.manifest_schema import ManifestDocument

READ_NBYTES = 4 << 20
DIGESTS = "digests"
NO_DIGESTS = "no digests, since it was written with --digest none"
CHECKED_AROUND = "bytes around tensors"
NO_AROUND = "no digest of the bytes around tensors, since an older release wrote it"
NO_SPANS = (
    "no digest of the bytes around tensors, since its format does not tell where its manifest is"
)


def check_digests(
    ckpt: Checkpoint, document: ManifestDocument, threads: int | None, phases: Phases
) -> tuple[list[str], list[str]]:
    """Return the checks that the manifest allows, and the problems: bytes of another digest."""
    with closing(Files(mounts=ckpt.files.mounts)) as files:  # compares no checksum of the source
        return _check_with(files, ckpt, document, threads, phases)


def _check_with(
    files: Files,
    ckpt: Checkpoint,
    document: ManifestDocument,
    threads: int | None,
    phases: Phases,
) -> tuple[list[str], list[str]]:
    has_digests = all(chunk.digest for _, chunk in chunks_of(document))
    has_around = _around(document) is not None
    phases.begin(HASHING, _hashed_nbytes(document) if has_digests else 0)
    problems = list(_chunk_problems(files, ckpt, document, threads, phases)) if has_digests else []
    if has_around:
        problems += _around_problems(files, ckpt, document)
    problems += _file_problems(files, ckpt, document, phases)
    around = CHECKED_AROUND
    if not has_around:
        around = NO_SPANS if SELF in document else NO_AROUND
    return [DIGESTS if has_digests else NO_DIGESTS, around], problems


def _hashed_nbytes(document: ManifestDocument) -> int:
    """Return the bytes that are hashed: of chunks, of carried files, of files with a sha256."""
    whole = [entry["nbytes"] for entry in document["carried"].values()]
    whole += [entry["nbytes"] for entry in document["files"].values() if "sha256" in entry]
    nbytes: int = sum([chunk.nbytes for _, chunk in chunks_of(document)], sum(whole))
    return nbytes


def _chunk_problems(
    files: Files,
    ckpt: Checkpoint,
    document: ManifestDocument,
    threads: int | None,
    phases: Phases,
) -> Iterator[str]:
    base = Path(ckpt.path)

    def check(item: tuple[str, ChunkRow]) -> str | None:
        key, chunk = item
        file = str(base / chunk.file) if base.is_dir() else ckpt.path
        digest = _digest(files, file, chunk.offset, chunk.nbytes)
        phases.advance(chunk.nbytes, key)
        if digest == chunk.digest:
            return None
        return (
            f"{key}: xxh3 {digest} at byte {chunk.offset} of {chunk.file}, expected {chunk.digest}"
        )

    ordered = sorted(chunks_of(document), key=lambda item: item[1][:2])  # by file and offset
    with ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1)) as pool:
        yield from (problem for problem in pool.map(check, ordered, chunksize=64) if problem)


def _around(document: ManifestDocument) -> dict[str, str] | None:
    """Return the digest of the bytes around tensors by file, "" for a one-file output; None where
    the manifest has none."""
    files = {name: entry.get(AROUND, NOT_TAKEN) for name, entry in document["files"].items()}
    around = document.get(AROUND)
    stated = files or {"": NOT_TAKEN if around is None else around}
    return None if NOT_TAKEN in stated.values() else stated


def _around_problems(files: Files, ckpt: Checkpoint, document: ManifestDocument) -> Iterator[str]:
    """Yield a problem for each file whose bytes outside the chunks differ from what was written."""
    base = Path(ckpt.path)
    spans: dict[str, list[tuple[int, int]]] = {}
    for _, chunk in chunks_of(document):
        name = chunk.file if base.is_dir() else ""
        spans.setdefault(name, []).append((chunk.offset, chunk.nbytes))
    if not base.is_dir() and ckpt.index.manifest_spans is not None:
        inside = ckpt.index.manifest_spans()
        spans.setdefault("", []).extend(inside)
        yield from _crc_problems(files, ckpt, inside)
    for name, expected in (_around(document) or {}).items():
        file = base / name if name else base
        held = spans.get(name, ())
        offsets, sizes = [span[0] for span in held], [span[1] for span in held]
        digest = digest_around(files, str(file), nbytes_of(file), offsets, sizes)
        if digest != expected:
            yield (
                f"{name or ckpt.shown}: xxh3 {digest} of the bytes around its tensors,"
                f" expected {expected}"
            )


def _crc_problems(
    files: Files, ckpt: Checkpoint, spans: Sequence[tuple[int, int]]
) -> Iterator[str]:
    """Yield a problem for each CRC-32 of the manifest inside a one-file output that is not its own.

    The first of the spans is the manifest, the others are its CRC-32s.
    """
    expected = crc32(files.read(ckpt.path, *spans[0]))
    for offset, nbytes in spans[1:]:
        stored = int.from_bytes(files.read(ckpt.path, offset, nbytes), "little")
        if stored != expected:
            yield (
                f"{ckpt.shown}: CRC-32 {stored:08x} of the manifest at byte {offset},"
                f" expected {expected:08x}"
            )


def _file_problems(
    files: Files, ckpt: Checkpoint, document: ManifestDocument, phases: Phases
) -> Iterator[str]:
    """Yield a problem for each file that is not the one that was carried over, or of another
    sha256."""
    base = Path(ckpt.path)
    for name, entry in document["carried"].items():
        file, nbytes = base / name, entry["nbytes"]
        if nbytes_of(file) != nbytes or _digest(files, str(file), 0, nbytes) != entry["xxh3"]:
            yield f"{name}: is not the file that was carried over"
        phases.advance(nbytes, name)
    for name, stated in document["files"].items():
        if "sha256" in stated:
            if sha256_of(base / name, ckpt.files.mounts) != stated["sha256"]:
                yield f"{name}: sha256 differs from the manifest"
            phases.advance(stated["nbytes"], name)


def _digest(files: Files, file: str, offset: int, nbytes: int) -> str:
    import xxhash

    digest = xxhash.xxh3_64()
    for at in range(0, nbytes, READ_NBYTES):
        digest.update(files.read(file, offset + at, min(READ_NBYTES, nbytes - at)))
    return digest.hexdigest()


def sha256_of(file: Path, mounts: Mounts | None = None) -> str:
    """Return the SHA-256 of a file; of one in `mounts`, that of its verified local copy."""
    import hashlib

    mounts = Mounts() if mounts is None else mounts
    with mounts.local_copy(file).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
