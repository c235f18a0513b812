"""The content of a push: files of a local checkpoint with their hashes, and the old files of the
repository that they replace.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.printable import quote
from ckptmap.errors import AnswerNo, DestinationError, RunError
from ckptmap.operations.check_digests import sha256_of
from ckptmap.operations.verify import read_manifest, verify
from ckptmap.storage.hub.entry import Entry, git_sha1
from ckptmap.storage.manifest_schema import ManifestDocument
from ckptmap.storage.resource_limits import or_resource_error
from ckptmap.storage.safe_names import problem_in_repository
from ckptmap.storage.sync import raised

WEIGHTS = re.compile(
    r"((diffusion_pytorch_)?model|ckptmap)(-\d+-of-\d+)?\.safetensors"
    r"|((diffusion_pytorch_)?model|ckptmap)\.safetensors\.index\.json"
    r"|(diffusion_)?pytorch_model(-\d+-of-\d+)?\.bin|(diffusion_)?pytorch_model\.bin\.index\.json"
    r"|ckptmap\.manifest\.json"
)
"""Names that a loader takes for the model's weights: old ones must not stay beside new ones. They
do not match adapters, variants, or files in folders below."""
LOCAL_ONLY = re.compile(
    r"(.*/)?(\.git|\.cache|__pycache__)(/.*)?|.*\.(lock|tmp|incomplete)|\.env.*"
)


@dataclass(frozen=True)
class UploadItem:
    """One file to publish at `path`: a local file, or its content."""

    path: str
    nbytes: int
    sha256: str
    file: Path | None = None
    content: bytes = b""

    def equals(self, entry: Entry | None) -> bool:
        """Return whether the repository has this very file."""
        if entry is None or entry.nbytes != self.nbytes:
            return False
        if entry.sha256 is not None:
            return entry.sha256 == self.sha256
        return entry.git_sha1 == git_sha1(self.read())

    def read(self) -> bytes:
        """Return the content. Raises RunError CKM306."""
        if self.file is None:
            return self.content
        with self.reading():
            return self.file.read_bytes()

    def reading(self) -> AbstractContextManager[None]:
        """Raise RunError CKM306, or CKM313, for an OSError of the local file in the block."""
        return _reading(self.file)


@contextmanager
def _reading(file: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failed = RunError(
            "CKM306",
            f"{file}: cannot be read to publish it: {error.strerror or error}",
            "repair the disk or its mount, then run the same command again",
        )
        raise or_resource_error(error, failed) from error


@dataclass(frozen=True)
class Content:
    """Everything that one push publishes; `deleted` are paths of the repository to delete."""

    items: Sequence[UploadItem]
    deleted: Sequence[str] = ()

    @property
    def id(self) -> str:
        """An id of the content, the same on every machine."""
        digest = hashlib.sha256()
        for item in sorted(self.items, key=lambda item: item.path):
            digest.update(f"{item.path} {item.nbytes} {item.sha256}\n".encode())
        return digest.hexdigest()[:12]

    @property
    def change(self) -> str:
        """The id, extended by the deletions: a pull request that began before a file was there
        cannot delete it."""
        deletions = hashlib.sha256("\n".join(sorted(self.deleted)).encode()).hexdigest()[:6]
        return f"{self.id}-{deletions}" if self.deleted else self.id

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def left(self, tree: Mapping[str, Entry]) -> list[UploadItem]:
        """Return the items that the tree does not have yet."""
        return [item for item in self.items if not item.equals(tree.get(item.path))]

    def is_in(self, tree: Mapping[str, Entry]) -> bool:
        return not self.left(tree) and not any(path in tree for path in self.deleted)


def items_of(ckpt: Checkpoint, folder: str, fresh: bool) -> tuple[list[UploadItem], list[str]]:
    """Return the files of a local checkpoint, to publish in `folder` of the repository, and notes.

    `fresh`: the checkpoint was written just now, so its manifest has the hashes of the files.
    Otherwise files are compared with the manifest, if there is one: DestinationError CKM715 where
    they differ.
    """
    sha256: Mapping[str, str] = _known_sha256(ckpt) if fresh else {}
    if not fresh:
        _check(ckpt)
    place = Path(ckpt.path)
    if place.is_file():
        return [_item(place, place.name, folder, sha256)], []
    names, left = names_of(place)
    items = [_item(file, name, folder, sha256) for file, name in names.items()]
    if not items:
        raise DestinationError(
            "CKM715", f"{place}: holds no file to publish", "give the directory that convert wrote"
        )
    return items, [f"left behind: {name}" for name in left]


def names_of(place: Path) -> tuple[dict[Path, str], list[str]]:
    """Return the names in the repository of the files of a directory, and the names left behind.

    Raises DestinationError CKM715 for a name that no repository should hold, RunError CKM306, or CKM313, for a
    directory that cannot be listed: `Path.rglob` passes over it, or not, by the version of Python.
    """
    with _reading(place):
        files = sorted(filter(Path.is_file, _below(place)))
    names = {file: file.relative_to(place).as_posix() for file in files}
    left = [name for name in names.values() if LOCAL_ONLY.fullmatch(name)]
    names = {file: name for file, name in names.items() if name not in left}
    for file, name in names.items():
        problem = problem_in_repository(name)
        if problem:
            raise DestinationError(
                "CKM715", f"{file}: {problem}; nothing was pushed", "rename or remove it"
            )
    return names, left


def _below(place: Path) -> Iterator[Path]:
    """Yield what is no directory below a place. Raises OSError where one cannot be listed."""
    for folder, _, names in os.walk(place, onerror=raised):
        yield from (Path(folder, name) for name in names)


def _check(ckpt: Checkpoint) -> None:
    if manifest_of(ckpt) is None:
        return
    report = verify(ckpt.path)
    if not report.intact:  # a file that was added beside is one to publish
        raise DestinationError(
            "CKM715",
            f"{ckpt.path}: is not what its manifest says: {report.problems[0]}",
            f"see all of it with: ckptmap verify {quote(ckpt.path)}",
        )


def _known_sha256(ckpt: Checkpoint) -> Mapping[str, str]:
    """Return the SHA-256 of files that the manifest states."""
    manifest = manifest_of(ckpt)
    files = {} if manifest is None else manifest["files"]
    return {name: about["sha256"] for name, about in files.items() if "sha256" in about}


def manifest_of(ckpt: Checkpoint) -> ManifestDocument | None:
    """Return the manifest; None where ckptmap did not write the checkpoint."""
    try:
        return read_manifest(ckpt)
    except AnswerNo:
        return None


def _item(file: Path, name: str, folder: str, sha256: Mapping[str, str]) -> UploadItem:
    with _reading(file):
        digest = sha256.get(name) or sha256_of(file)
        return UploadItem(_in(folder, name), file.stat().st_size, digest, file)


def content_item(folder: str, name: str, content: bytes) -> UploadItem:
    """Return an item with the given content."""
    digest = hashlib.sha256(content).hexdigest()
    return UploadItem(_in(folder, name), len(content), digest, content=content)


def _in(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def replaced_paths(tree: Iterable[str], items: Sequence[UploadItem], folder: str) -> list[str]:
    """Return old weights in `folder` that a loader could take in place of the new ones."""
    own_paths = {item.path for item in items}
    below = _in(folder, "")
    names = {path: path.removeprefix(below) for path in tree if path.startswith(below)}
    return [
        path for path, name in names.items() if path not in own_paths and WEIGHTS.fullmatch(name)
    ]
