"""Check what --overwrite would delete: only a checkpoint at exactly this path may be replaced.

`open` searches a directory for the one checkpoint inside it. So a home directory with a single
model in it can be opened, but must not be replaced. Files that a user put into the directory of a
checkpoint must not be lost either. --overwrite may delete the files of the checkpoint, files that
ckptmap wrote, files that frameworks keep beside weights, and files that the new output replaces by
name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open
from ckptmap.core.formatting import some
from ckptmap.core.json_text import parse_json
from ckptmap.errors import CkptmapError, DestinationError, SourceError
from ckptmap.execution import manifest as manifests
from ckptmap.formats.detect import look
from ckptmap.operations.extra_files import CACHES
from ckptmap.operations.verify import read_manifest
from ckptmap.storage.manifest_schema import ManifestDocument
from ckptmap.storage.resource_limits import or_resource_error
from ckptmap.storage.sync import raised

HINT = "--overwrite replaces checkpoints only: remove it yourself, or choose another destination"
FOREIGN = "--overwrite would delete them: move them elsewhere, or choose another destination"
COMPANION = re.compile(
    r"README(\.md)?|LICENSE.*|NOTICE.*|USE_POLICY.*|\.git(attributes|ignore)|\.DS_Store"
    r"|(\w+_)?config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|modules\.json"
    r"|vocab\.(json|txt)|merges\.txt|chat_template.*|spiece.*|sentencepiece.*|.*\.jinja"
    r"|(modeling|configuration|tokenization|(image_|video_)?processing|feature_extraction)_\w+\.py"
    r"|zero_to_fp32\.py|training_args\.(bin|json)|trainer_state\.json"
    r"|(all|train|eval|test|predict)_results\.json|data\.pt|.*\.index\.json"
    r"|((diffusion_)?pytorch_)?model([-_.]\w+)*\.(bin|safetensors)|\.metadata|__\d+_\d+\.distcp"
)
"""Matches the names of files that transformers, its Trainer, verl and torch keep beside weights. A
user is unlikely to give such a name to another file."""
SHOWN = 3


def manifest_at(target: Path) -> ManifestDocument | None:
    """Return the manifest of the checkpoint at the destination; None if there is none."""
    if target.is_symlink() or not (target.is_file() or target.is_dir()):
        return None
    try:
        with open(target) as ckpt:
            return read_manifest(ckpt) if _lies_at(ckpt, target) else None
    except (CkptmapError, OSError):
        return None


def refuse_stranger(target: Path, written: Collection[str] = ()) -> None:
    """Raise DestinationError CKM301 if --overwrite would delete more than a checkpoint, CKM304 if what
    it would delete cannot be listed.

    `written` are the names of the files of the new output: existing files with these names may be
    replaced.
    """
    try:
        _refuse_stranger(target, written)
    except DestinationError:
        raise
    except OSError as error:
        failed = DestinationError(
            "CKM304",
            f"{target}: --overwrite would delete it, but what it holds cannot be listed:"
            f" {error.strerror} ({error.filename or target})",
            "correct its permissions or repair the disk, or choose another destination",
        )
        raise or_resource_error(error, failed) from error


def _refuse_stranger(target: Path, written: Collection[str]) -> None:
    if not target.is_file() and not (target.is_dir() and any(target.iterdir())):
        return
    kind = "directory" if target.is_dir() else "file"
    try:
        with open(target) as ckpt:
            if not _lies_at(ckpt, target):
                raise _refusal(f"{target}: is a directory with a checkpoint inside: {ckpt.path}")
            inside = _others(target, ckpt.index.files) if kind == "directory" else []
            foreign = list(_foreign(target, ckpt, written)) if kind == "directory" else []
    except SourceError as error:
        raise _refusal(
            f"{target}: is a {kind} that holds no checkpoint ({error.message})"
        ) from error
    if inside:
        raise _refusal(f"{target}: holds other checkpoints beside its own: {some(inside)}")
    if foreign:
        raise _refusal(
            f"{target}: holds files that do not belong to its checkpoint: {some(foreign, SHOWN)}",
            FOREIGN,
        )


def _refusal(message: str, hint: str = HINT) -> DestinationError:
    return DestinationError("CKM301", message, hint)


def _foreign(target: Path, ckpt: Checkpoint, written: Collection[str]) -> Iterator[str]:
    """Yield the files below `target` that --overwrite must not delete.

    They belong neither to the checkpoint nor to ckptmap or a framework, and no new file replaces
    them.
    """
    root = target.absolute()
    own = {*ckpt.index.files, *ckpt.index.file_of.values()}
    own |= {str(root / name) for name in (*_listed(root), *written)}
    beside = ckpt.index.sidecar_dir
    for folder, folders, names in os.walk(root, onerror=raised):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if name not in CACHES)
        for name in sorted(names):
            file = here / name
            if str(file) in own or COMPANION.fullmatch(name) or str(here) == beside:
                continue
            yield file.relative_to(root).as_posix()


def _listed(root: Path) -> list[str]:
    """Return the files that an earlier run of ckptmap wrote here, as its manifest lists them."""
    try:
        document = parse_json((root / manifests.NAME).read_bytes())
        return [manifests.NAME, *document["files"], *document["carried"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _lies_at(ckpt: Checkpoint, target: Path) -> bool:
    return Path(ckpt.path).absolute() == target.absolute()


def _others(target: Path, files: Sequence[str]) -> list[str]:
    """Return the directories in `target` that are other checkpoints, such as checkpoint-500."""
    root = target.absolute()
    own = (Path(file) for file in files)
    mine = {file.relative_to(root).parts[0] for file in own if file.is_relative_to(root)}
    others = []
    for entry in sorted(target.iterdir()):
        try:
            if entry.name not in mine and entry.is_dir() and registry.knows(look(entry)):
                others.append(entry.name)
        except SourceError:
            continue
    return others
