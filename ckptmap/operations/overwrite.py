"""What --overwrite may replace: a checkpoint that lies exactly there, and nothing beside it.

`open` looks into a directory for the one checkpoint inside; a home directory with a single model
in it opens well, and must not be replaced. Nor is a file lost that somebody put into a checkpoint's
own directory: what goes is the checkpoint, what we wrote, what frameworks keep beside weights, and
what the new output has a file of that name for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open
from ckptmap.errors import CkptmapError, DestinationError, SourceError
from ckptmap.execution import manifest as manifests
from ckptmap.formats.detect import look
from ckptmap.operations.verify import read_manifest

HINT = "--overwrite replaces checkpoints only; remove it yourself, or choose another"
FOREIGN = "--overwrite would delete that; move it elsewhere, or choose another destination"
COMPANION = re.compile(
    r"README(\.md)?|LICENSE.*|NOTICE.*|USE_POLICY.*|\.git(attributes|ignore)|\.DS_Store"
    r"|(\w+_)?config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|modules\.json"
    r"|vocab\.(json|txt)|merges\.txt|chat_template.*|spiece.*|sentencepiece.*|.*\.jinja"
    r"|(modeling|configuration|tokenization|(image_|video_)?processing|feature_extraction)_\w+\.py"
    r"|zero_to_fp32\.py|training_args\.(bin|json)|trainer_state\.json"
    r"|(all|train|eval|test|predict)_results\.json|data\.pt|.*\.index\.json"
    r"|((diffusion_)?pytorch_)?model([-_.]\w+)*\.(bin|safetensors)|\.metadata|__\d+_\d+\.distcp"
)
"""What transformers, its Trainer, verl and torch keep beside the weights, or leave of them: names
of their own, and few that a user would give."""
CACHES = (".cache", "__pycache__", ".ipynb_checkpoints")
"""Directories that programs make for themselves; .cache is huggingface_hub's."""
SHOWN = 3


def manifest_at(target: Path) -> dict[str, Any] | None:
    """The manifest of what is at the destination: a run killed just after it published left it."""
    if target.is_symlink() or not (target.is_file() or target.is_dir()):
        return None
    try:
        with open(target) as ckpt:
            return read_manifest(ckpt) if _lies_at(ckpt, target) else None
    except (CkptmapError, OSError):
        return None


def refuse_stranger(target: Path, written: Collection[str] = ()) -> None:
    """--overwrite replaces a checkpoint, never what holds something else; `written` are the names
    of files that come in the place of others. Raises DestinationError CKM301."""
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
        raise _refusal(f"{target}: holds other checkpoints beside its own: {', '.join(inside)}")
    if foreign:
        more = f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
        raise _refusal(
            f"{target}: holds what is no part of its checkpoint: {', '.join(foreign[:SHOWN])}{more}",
            FOREIGN,
        )


def _refusal(message: str, hint: str = HINT) -> DestinationError:
    return DestinationError("CKM301", message, hint)


def _foreign(target: Path, ckpt: Checkpoint, written: Collection[str]) -> Iterator[str]:
    """Files below that are none of the checkpoint's, ours, a framework's or replaced."""
    root = target.absolute()
    own = {*ckpt.index.files, *ckpt.index.file_of.values()}
    own |= {str(root / name) for name in (*_listed(root), *written)}
    beside = ckpt.index.sidecar_dir
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if name not in CACHES)
        for name in sorted(names):
            file = here / name
            if str(file) in own or COMPANION.fullmatch(name) or str(here) == beside:
                continue
            yield file.relative_to(root).as_posix()


def _listed(root: Path) -> list[str]:
    """What an earlier run of ours wrote here, by its manifest."""
    try:
        document = json.loads((root / manifests.NAME).read_bytes())
        return [manifests.NAME, *document["files"], *document["carried"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _lies_at(ckpt: Checkpoint, target: Path) -> bool:
    return Path(ckpt.path).absolute() == target.absolute()


def _others(target: Path, files: Sequence[str]) -> list[str]:
    """Directories below that are checkpoints, and hold no part of this one: checkpoint-500/."""
    root = target.absolute()
    own = (Path(file) for file in files)
    mine = {file.relative_to(root).parts[0] for file in own if file.is_relative_to(root)}
    found = []
    for entry in sorted(target.iterdir()):
        try:
            if entry.name not in mine and entry.is_dir() and registry.knows(look(entry)):
                found.append(entry.name)
        except SourceError:
            continue
    return found
