"""Read the directories that torch_checkpointing (meta-pytorch) writes, as torchtitan 0.3 can.

    step-10/metadata.pkl                                  how the tensors of `model` and `optimizer` are cut
            model_0.pt model_1.pt optimizer_0.pt ...      each rank's own value of an item
            step_0.pt train_state_0.pt dataloader_0.pt    items without tensors, or without a resharder

A manager that saves while training waits writes `metadata.pkl` with its first save only. Without it the
DTensors in the files tell where they belong. Source: torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath

from ckptmap.core.formatting import natural, some
from ckptmap.core.printable import join
from ckptmap.errors import SourceError
from ckptmap.formats.detect import UNFINISHED
from ckptmap.formats.torch_checkpointing.item_files import (
    BARE_PARTS,
    DEFAULT_FILE,
    JSON,
    ItemFiles,
    check_ranks,
    incomplete,
    item_files,
    left_aside,
)
from ckptmap.formats.torch_checkpointing.metadata import (
    MARKS_NBYTES,
    METADATA,
    SAFETENSORS,
    TORCH,
    StatedItems,
    looks_like_metadata,
    parse_metadata,
)
from ckptmap.formats.torch_checkpointing.safetensors_items import safetensors_leaves
from ckptmap.formats.torch_checkpointing.torch_items import TorchItem, read_item
from ckptmap.protocols import Index, Place, in_saved_order
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.files import Files
from ckptmap.storage.json_file import read_document
from ckptmap.storage.resource_limits import unreadable
from ckptmap.tensors import Leaf, Path

MODEL = "model"
FIRST_RANK = re.compile(r"(?!(?i:.*rank_0))[A-Za-z0-9_-]+_0\.(pt|safetensors)")
"""Files of rank 0 under the names of the default layout; those that `rank_files` reads say `rank_0`."""
MAX_ITEMS = 16
"""Files of rank 0 that are looked at to recognise a save."""
MAX_SAVES = 64
"""Saves before this one in which a `metadata.pkl` is looked for."""
_SHARDED = b"torch.distributed.tensor"
"""The module of DTensor, as the pickle of a rank names it."""
_SHARDED_NBYTES = 64 << 10


class TorchCheckpointing:
    """Reads the files of all items and ranks of one save. It refuses a set that is not whole."""

    name = "torch-checkpointing"

    def claims(self, place: Place) -> bool:
        """Return True for a directory with a `metadata.pkl` of torch_checkpointing, or with what a later save of
        the same manager leaves: files of rank 0 that hold DTensors, or that lie beside such a save."""
        if not place.is_dir:
            return False
        root = FilePath(place.path)
        if METADATA in place.names and _is_metadata(root / METADATA, place.mounts):
            return True
        first = [name for name in place.names if FIRST_RANK.fullmatch(name)]
        if any(
            _SHARDED in _head(root / n, _SHARDED_NBYTES, place.mounts) for n in first[:MAX_ITEMS]
        ):
            return True
        if f"{MODEL}_0.pt" in first and len(first) > 1 and not _other_ranks(place.names):
            return True
        return bool(first) and metadata_of_run(root, place.mounts) is not None

    def index(self, place: Place) -> Index:
        """Return the leaves of all items, each below the key of its item.

        Raise SourceError CKM109 for malformed metadata, or metadata of another save, CKM110 if files of
        ranks are missing or too many, CKM116 for a file outside the directory, and the errors of
        `torch_save.reader.load` and of safetensors headers.
        """
        root = str(FilePath(place.path).absolute())
        metadata = _metadata(root, place)
        items = item_files(root, place.names, metadata)
        if metadata is None:
            _refuse_unplaced(root, place)
        files = Files(mounts=place.mounts)
        try:
            read = {item.key: read_item(files, item) for item in items if item.form == TORCH}
            world = _world(root, items, read.values(), metadata)
            leaves: dict[Path, Leaf] = {}
            for item in items:
                is_torch = item.form == TORCH
                leaves |= (
                    read[item.key].leaves() if is_torch else _others(files, item, place.mounts)
                )
        finally:
            files.close()
        used = [item.files[rank] for item in items for rank in sorted(item.files)]
        used += [str(FilePath(root) / METADATA)] if metadata is not None else []
        return Index(
            self.name, leaves, tuple(used), world=world, notes=_notes(root),
            unread_files=left_aside(root, place.names, {*used}), setup="fsdp2-ranks" if world > 1 else "full",
            keeps_order=None if any(item.form == SAFETENSORS for item in items) else in_saved_order,
        )  # fmt: skip


def _other_ranks(names: Sequence[str]) -> bool:
    """Return whether there are files of other ranks than 0, which could be epochs of one process as well."""
    return any(match and match["rank"] != "0" for match in map(DEFAULT_FILE.fullmatch, names))


def _head(file: FilePath, nbytes: int, mounts: Mounts) -> bytes:
    try:
        return mounts.read_head(file, nbytes)
    except OSError:
        return b""


def _is_metadata(file: FilePath, mounts: Mounts) -> bool:
    return looks_like_metadata(_head(file, MARKS_NBYTES, mounts))


def metadata_of_run(root: FilePath, mounts: Mounts) -> FilePath | None:
    """Return the `metadata.pkl` of the last save before this one in the directory above; None: there is none."""
    try:
        beside = sorted((entry.name for entry in os.scandir(root.absolute().parent)), key=natural)
    except OSError:
        return None
    earlier = [name for name in beside if natural(name) < natural(root.absolute().name)]
    for name in reversed(earlier[-MAX_SAVES:]):
        file = root.absolute().parent / name / METADATA
        if file.is_file() and _is_metadata(file, mounts):
            return file
    return None


def _metadata(root: str, place: Place) -> StatedItems | None:
    if METADATA not in place.names:
        return None
    path = FilePath(root) / METADATA
    try:
        data = place.mounts.local_copy(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_metadata(data, str(path))


def _refuse_unplaced(root: str, place: Place) -> None:
    """Raise SourceError CKM109 if `metadata.pkl` is missing, and items are laid out so that only it tells where
    their parts belong: in safetensors form, or in folders."""
    bare = [name for name in place.names if BARE_PARTS.fullmatch(name)]
    bare += [name for name in place.names if _holds_parts(FilePath(root) / name)]
    if not bare:
        return
    first = metadata_of_run(FilePath(root), place.mounts)
    hint = f"copy the {METADATA} of the first save of the same run into this directory"
    if first is not None:
        hint = f"if both are of one run: {join(['cp', str(first), root])}"
    raise SourceError(
        "CKM109",
        f"{root}: {METADATA} is missing, which a manager writes with its first save only, and it alone tells"
        f" how to join {some(bare)}",
        hint,
    )


def _holds_parts(folder: FilePath) -> bool:
    try:
        return folder.is_dir() and any(
            entry.name.endswith((".pt", ".safetensors")) for entry in os.scandir(folder)
        )
    except OSError:
        return False


def _world(
    root: str, items: Sequence[ItemFiles], read: Iterable[TorchItem], metadata: StatedItems | None
) -> int:
    """Return the number of ranks. Raise SourceError CKM110 unless all items agree and are whole."""
    stated_by = [one for one in read if one.world]
    stated = {one.world: one for one in stated_by}
    ranks = max((rank for item in items for rank in item.files), default=0) + 1
    world = metadata.world if metadata is not None else max(stated, default=ranks)
    for number, one in stated.items():
        if number > world:
            file = next(iter(one.item.files.values()))
            raise SourceError(
                "CKM110",
                f"{file}: holds tensors of {number} ranks, but {METADATA} says {world}",
                f"copy {METADATA} and the files of one save into a directory of their own",
            )
    check_ranks(root, items, world, {one.item.key for one in stated_by if one.world > 1})
    if not items:
        raise incomplete(root, f"holds {METADATA} and none of the files that it lists")
    return world


def _others(files: Files, item: ItemFiles, mounts: Mounts) -> Mapping[Path, Leaf]:
    """Return the leaves of an item that is not in torch.save files."""
    if item.form == SAFETENSORS:
        return safetensors_leaves(files, item)
    assert item.form == JSON and len(item.files) == 1
    return {(item.key,): read_document(next(iter(item.files.values())), mounts)}


def _notes(root: str) -> tuple[str, ...]:
    name = FilePath(root).name
    if not name.startswith(UNFINISHED):
        return ()
    return (
        f"torch_checkpointing names a save {name} until all ranks have written it: all files that it lists"
        " are here, and others may be missing",
    )
