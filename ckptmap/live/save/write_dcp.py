"""Writes a save: each rank its own file of a DCP directory, and rank 0 publishes the directory.

snapshot -> files of all ranks in one work directory -> manifest -> read back -> one rename
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ckptmap import registry
from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.core.formatting import counted
from ckptmap.errors import DestinationError, RunError
from ckptmap.execution import manifest
from ckptmap.live.model.rank_group import UNTOUCHED, RankGroup, said_if_lost
from ckptmap.live.model.tensor_reader import as_bytes
from ckptmap.live.save.pace import Pace
from ckptmap.live.save.staged_values import Snapshot, ValuesKey
from ckptmap.operations.check_structure import check_structure
from ckptmap.operations.overwrite import refuse_stranger
from ckptmap.protocols import OutFile, OutState
from ckptmap.storage.bytes_around import digest_around
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.files import Files
from ckptmap.storage.manifest_file import AROUND, SCHEMA, parse
from ckptmap.storage.own_files import open_plain, write_new
from ckptmap.storage.publish import WorkDirectory
from ckptmap.storage.publish_by_marker import is_pending
from ckptmap.storage.recover import sweep_saves
from ckptmap.storage.resource_limits import or_resource_error
from ckptmap.tensors import Box, Path
from ckptmap.version import __version__

if TYPE_CHECKING:
    import torch

WRITER = "dcp"
PIECE = 1 << 20
"""Bytes that are digested and written together."""
UNKNOWN = "{0} is complete or as it was: `ckptmap verify {0}` tells"
IS_PUBLISHED, PUBLISHED = "{0} is complete and published", "published"
"""What becomes of a destination where ranks are lost while rank 0 publishes it, and after it has said so."""


@dataclass(frozen=True)
class FileLayout:
    """The files of all ranks: every rank computes the same.

    values  of tensors that are no copies of what a rank holds: rank 0 writes them
    """

    state: OutState
    files: Sequence[OutFile]
    digest: str
    values: Mapping[ValuesKey, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, state: OutState, name: str, values: Mapping[ValuesKey, torch.Tensor] | None = None
    ) -> FileLayout:
        files = registry.writer(WRITER).files(state, name)
        said = [(f.name, f.nbytes, [(s.path, s.box, s.offset) for s in f.slots]) for f in files]
        digest = hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()
        return cls(state, files, digest, values or {})

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def names(self) -> set[str]:
        """The names of all files of the output, the manifest included."""
        return {*(file.name for file in self.files), manifest.NAME}


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written, with the digests of its slots in order."""

    name: str
    digests: tuple[str, ...]


def write(
    layout: FileLayout, copies: Snapshot, dst: FilePath,
    overwrite: bool, peers: RankGroup, bandwidth: int | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Write and publish the files; return the notes of rank 0. Every rank calls it.

    bandwidth  bytes that each rank writes a second at most; None: no limit

    Raises DestinationError or RunError on all ranks; the destination is then as it was."""
    work: WorkDirectory | None = None
    try:
        with said_if_lost(UNTOUCHED.format(dst)):
            with peers.together():
                if peers.rank == 0:
                    work = _open(layout, dst, overwrite)
                    work.refuse_strangers(layout.names)
                    work.notes += tuple(sweep_saves(work.dst))
            out_dir = FilePath(peers.all(str(work.out_dir) if work else "")[0])
            everything = _write_mine(layout, copies, out_dir, peers, Pace(bandwidth))
        outcomes = {"": UNKNOWN.format(dst), PUBLISHED: IS_PUBLISHED.format(dst)}
        with peers.said_if_lost(outcomes):
            with peers.together():
                if work is not None:
                    _finish(layout, out_dir, everything)
                    work.publish(layout.names)
                    peers.say(PUBLISHED)
            return peers.all(tuple(work.notes) if work else ())[0]
    finally:
        if work is not None:
            work.__exit__(None, None, None)


def _write_mine(
    layout: FileLayout, copies: Snapshot, out_dir: FilePath, peers: RankGroup, pace: Pace
) -> list[WrittenFile]:
    """Write the files of this rank, and return what all ranks have written."""
    written: list[WrittenFile] = []
    with peers.together():
        copies.wait()
        values = ChainMap({**layout.values}, copies.values)  # type: ignore[arg-type]
        for file in _mine(layout.files, peers.rank):
            written.append(_write_file(out_dir / file.name, file, values, pace))
        copies.release()
    return [one for some in peers.all(written) for one in some]


def _open(layout: FileLayout, dst: FilePath, overwrite: bool) -> WorkDirectory:
    if overwrite and not is_pending(dst):
        refuse_stranger(dst)
    return WorkDirectory.open(
        dst, layout.digest, one_file=False, overwrite=overwrite, nbytes=layout.nbytes
    )


def _mine(files: Sequence[OutFile], rank: int) -> list[OutFile]:
    """Return the files that this rank writes: its data file, and on rank 0 the files of no rank."""
    own = f"__{rank}_"
    return [
        file
        for file in files
        if file.name.startswith(own) or (rank == 0 and not file.name.startswith("__"))
    ]


def _write_file(
    path: FilePath, file: OutFile, values: Mapping[tuple[Path, Box], torch.Tensor], pace: Pace
) -> WrittenFile:
    """Write a file, and wait until it is on the disk: where ranks run on several machines, only that
    of the rank can see to it."""
    digests, crcs = [], []
    with _failures_named(path):
        write_new(path, [])
        fd = open_plain(path, os.O_WRONLY)
        try:
            for slot in file.slots:
                data = as_bytes(values[slot.path, slot.box])
                assert data.nbytes == slot.nbytes, slot
                digest, crc = _write_values(fd, data, slot.offset, file.needs_crc, pace)
                digests.append(digest)
                crcs.append(crc)
            for offset, piece in file.pieces(crcs if file.needs_crc else (), None):
                _write_all(fd, memoryview(piece), offset, pace)
            os.fsync(fd)
        finally:
            os.close(fd)
    return WrittenFile(file.name, tuple(digests))


@contextmanager
def _failures_named(path: FilePath) -> Iterator[None]:
    """Raise RunError CKM306 with the path where the system fails to write."""
    try:
        yield
    except DestinationError:
        raise
    except OSError as error:
        failed = RunError(
            "CKM306", f"{path}: write failed: {error.strerror}", _after_failed_write(error)
        )
        raise or_resource_error(error, failed) from error


def _after_failed_write(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space and save again"
    if error.errno == errno.ENOENT:
        return "its directory was removed or renamed while it was written: save again"
    return "check the disk and the permissions of the destination, and save again"


def _write_values(
    fd: int, data: memoryview, offset: int, needs_crc: bool, pace: Pace
) -> tuple[str, int]:
    """Write values and return their XXH3 digest and their CRC-32 (0 unless it is needed)."""
    import xxhash

    digest, crc = xxhash.xxh3_64(), 0
    for start in range(0, data.nbytes, PIECE):  # what is in the cache is read once from memory
        piece = data[start : start + PIECE]
        digest.update(piece)
        crc = crc32(piece, crc) if needs_crc else 0
        _write_all(fd, piece, offset + start, pace)
    return digest.hexdigest(), crc


def _write_all(fd: int, data: memoryview, offset: int, pace: Pace) -> None:
    for block in pace.blocks(data):
        while block.nbytes:
            done = os.pwrite(fd, block, offset)
            block, offset = block[done:], offset + done


def _finish(layout: FileLayout, out_dir: FilePath, written: Sequence[WrittenFile]) -> None:
    """Write the manifest, then open the directory and check that every tensor is where it was put."""
    around = _around(layout, out_dir)
    document = _document(layout, {one.name: one.digests for one in written}, around)
    with _failures_named(out_dir / manifest.NAME):
        write_new(out_dir / manifest.NAME, [manifest.emit(document)])
    with open_checkpoint(out_dir) as ckpt:
        problems = check_structure(ckpt, parse(manifest.emit(document), str(out_dir)))
    if problems:
        raise RunError(
            "CKM401",
            f"the save is not as planned: {problems[0]} ({counted(len(problems), 'problem')})",
            "nothing was published; save again; if it comes back, it is a defect of ckptmap, please report it",
        )


def _around(layout: FileLayout, out_dir: FilePath) -> dict[str, str]:
    """Return the digest of the bytes around the tensors of each file, read from what was written."""
    digests = {}
    with closing(Files(max_open=1)) as files:
        for file in layout.files:
            offsets, sizes = [s.offset for s in file.slots], [s.nbytes for s in file.slots]
            path = str(out_dir / file.name)
            digests[file.name] = digest_around(files, path, file.nbytes, offsets, sizes)
    return digests


def _document(
    layout: FileLayout, digests: Mapping[str, Sequence[str]], around: Mapping[str, str]
) -> dict[str, object]:
    """Return the manifest, as of a conversion whose source is a live run."""
    tensors: dict[str, dict[str, object]] = {}
    chunks: dict[str, list[tuple[object, ...]]] = {}
    for file in layout.files:
        for slot, digest in zip(file.slots, digests[file.name], strict=True):
            key, box = ".".join(map(str, slot.path)), slot.box
            mine = chunks.setdefault(key, [])
            mine.append((file.name, slot.offset, slot.nbytes, box.offsets, box.sizes, digest))
            tensors[key] = {"fqn": _fqn(slot.path), "chunks": mine}
    return {
        "schema": SCHEMA,
        "ckptmap": __version__,
        "plan": layout.digest,
        "setup": "fsdp2",
        "container": WRITER,
        "world_size": layout.state.world_size,
        "source": {"container": "live", "setup": "live"},
        "files": {
            file.name: {"nbytes": file.nbytes, AROUND: around[file.name]} for file in layout.files
        },
        "carried": {},
        "tensors": tensors,
        "logical": {},
        "records": dict(layout.state.records),
        "dropped": {},
        "tied": {},
    }


def _fqn(path: Path) -> str:
    """Return the FQN of a stored path: the path below its role."""
    return ".".join(map(str, path[2:] if path[0] == "optimizer" else path[1:]))
