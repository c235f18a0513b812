"""The base of a checkpoint that holds only a part of a model's weights, as `save(only=...)` records it.

extra.ckptmap.base.""       {"path": "/models/llama", "beside": "../../models/llama", "digest": "files:5a...", ...}
extra.ckptmap.base.policy   that of the model `policy`, of several

Where nothing is at `path` any more, the base is looked for at `beside`, a path from the checkpoint's directory,
which stays true where both are moved together. The digest is of content: of the manifest of a directory that ckptmap wrote, which has a digest of every
tensor; else of the bytes of all files. A place on the Hub is named by its commit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path as FilePath
from typing import cast

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import SourceError
from ckptmap.mapping.renaming import Renaming
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.sharding.reference_model import MANIFEST
from ckptmap.storage.source_changes import require_unchanged
from ckptmap.tensors import Path

KEY = "base"
RECORD: Path = ("ckptmap", KEY)
"""Where the bases are recorded, among the extra values."""
BLOCK_NBYTES = 1 << 22


@dataclass(frozen=True)
class BaseRecord:
    """A base as it is recorded.

    root         that it was opened with; empty: none
    names, drop  how its names were changed, in turn, when it was loaded, and which of its weights were left out
    beside       the path from the checkpoint's directory; empty: of no directory on the same disk
    """

    path: str
    digest: str
    names: tuple[Renaming, ...] = ()
    drop: Sequence[str] = ()
    beside: str = ""
    root: str = ""

    def to_plain(self) -> dict[str, object]:
        records = [names.record() for names in self.names] or [Renaming().record()]
        found: dict[str, object] = {
            "path": self.path,
            "digest": self.digest,
            "names": records[0] if len(records) == 1 else records,
            "drop": list(self.drop),
        }
        beside = {"beside": self.beside, "root": self.root}
        return found | {key: value for key, value in beside.items() if value}

    def places(self, checkpoint: str | os.PathLike[str]) -> list[str]:
        """Return the paths at which the base may be, for a checkpoint at this path: the one at which
        something is comes first."""
        found = [self.path]
        if self.beside and FilePath(checkpoint).is_dir():
            found.append(os.path.normpath(os.path.join(os.path.realpath(checkpoint), self.beside)))
        return sorted(found, key=lambda path: "://" not in path and not os.path.exists(path))


def path_beside(base: str, checkpoint: str | os.PathLike[str]) -> str:
    """Return the path of a base from the directory of a checkpoint, links resolved; empty: the base is on
    the Hub."""
    if "://" in base:
        return ""
    return os.path.relpath(os.path.realpath(base), os.path.realpath(checkpoint))


def recorded(ckpt: Checkpoint) -> dict[str, BaseRecord]:
    """Return the bases of a checkpoint by the name of their model, "" of one; empty where it has none.

    Raises SourceError CKM109 for a record that is none."""
    found: dict[str, dict[str, object]] = {}
    for path, value in ckpt.plain.items():
        if path[:2] != RECORD or len(path) < 4:
            continue
        entry = found.setdefault(str(path[2]), {})
        for segment in path[3:-1]:
            below = entry.setdefault(str(segment), {})
            entry = below if isinstance(below, dict) else {}
        entry[str(path[-1])] = value
    whole = ckpt.plain.get(RECORD)
    if isinstance(whole, Mapping):
        found = {str(name): dict(entry) for name, entry in whole.items()}
    return {name: _record(entry, ckpt.path) for name, entry in found.items()}


def _record(entry: Mapping[str, object], where: str) -> BaseRecord:
    path, digest, drop = (entry.get(name) for name in ("path", "digest", "drop"))
    beside, root = entry.get("beside", ""), entry.get("root", "")
    listed = isinstance(drop, list | tuple) and all(isinstance(one, str) for one in drop)
    texts = (path, digest, beside, root)
    if not (all(isinstance(text, str) for text in texts) and listed):
        raise SourceError(
            "CKM109", f"{where}: its record of a base is malformed", "load the base by itself first"
        )
    names = tuple(filter(None, map(Renaming.recorded, _each(entry.get("names")))))
    left_out = tuple(cast(Sequence[str], drop))
    return BaseRecord(str(path), str(digest), names, left_out, str(beside), str(root))


def _each(names: object) -> list[object]:
    """Return the records of names, of which there may be one or several: `{"0": ..., "1": ...}`."""
    if isinstance(names, Mapping) and names and all(str(key).isdecimal() for key in names):
        return [names[key] for key in sorted(names, key=int)]
    return list(names) if isinstance(names, list | tuple) else [names]


def note(ckpt: Checkpoint) -> str:
    """Return what a reader should be told of a checkpoint with bases; "" where it has none."""
    bases = recorded(ckpt)
    if not bases:
        return ""
    paths = ", ".join(dict.fromkeys(base.path for base in bases.values()))
    return (
        f"it holds a part of the weights; the others are those of {paths}, which `load` reads too"
    )


def content_digest(ckpt: Checkpoint) -> str:
    """Return the digest of a checkpoint's content. It reads all of it, unless ckptmap wrote it.

    Raises RunError CKM308 for files that changed since they were opened."""
    if ckpt.origin:
        return ckpt.origin
    require_unchanged(ckpt.fingerprints, ckpt.files.mounts, "load it again, then save")
    files = {*ckpt.index.files, *ckpt.fingerprints}
    return _digest(ckpt.path, tuple(sorted(files)), tuple(sorted(ckpt.fingerprints.items())))


@cache
def _digest(
    path: str, files: Sequence[str], fingerprints: Sequence[tuple[str, Fingerprint]]
) -> str:
    """The fingerprints are part of the key of the cache: files that are written anew are read anew."""
    import xxhash

    manifest = FilePath(path) / MANIFEST
    if manifest.is_file():
        return f"manifest:{xxhash.xxh3_128_hexdigest(manifest.read_bytes())}"
    seen = xxhash.xxh3_128()
    for file in files:
        name = os.path.relpath(file, path) if os.path.isdir(path) else ""
        seen.update(f"{name}\n{os.path.getsize(file)}\n".encode("utf-8", "surrogateescape"))
        with open(file, "rb", buffering=0) as opened:
            while block := opened.read(BLOCK_NBYTES):
                seen.update(block)
    return f"files:{seen.hexdigest()}"
