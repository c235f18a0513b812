"""Find the files of each item of a torch_checkpointing save, and refuse a set that is not whole.

    model_0.pt model_1.pt          an item `model`, one file for each rank: the default
    rank_0/model.pt ...            files where the layout of an item puts them; `metadata.pkl` lists these
    lr_scheduler.pt config.json    items that one rank writes, at a path of their layout

`metadata.pkl` lists the items that hold tensors and have a resharder. Files of the others are known by
their names alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path as FilePath

from ckptmap.core.formatting import counted, some
from ckptmap.errors import SourceError
from ckptmap.formats.detect import UNFINISHED
from ckptmap.formats.torch_checkpointing.metadata import (
    METADATA,
    SAFETENSORS,
    TORCH,
    StatedItem,
    StatedItems,
)
from ckptmap.storage.safe_names import inside

DEFAULT_FILE = re.compile(r"(?P<key>[A-Za-z0-9_-]+)_(?P<rank>0|[1-9]\d{0,8})\.pt")
BARE_PARTS = re.compile(r"(?P<key>[A-Za-z0-9_-]+)_(?P<rank>0|[1-9]\d{0,8})\.safetensors")
"""Files of an item in safetensors form, where its layout names them as the default does."""
_ONE_FILE = re.compile(r"(?P<key>[A-Za-z0-9_-]+)\.(pt|pth|json)")
_BESIDE_WEIGHTS = re.compile(
    r"(.*_)?config\.json|.*token.*\.json|vocab\.json|.*\.index\.json|ckptmap\..*|.*\.card\.json"
)
"""Files that describe a model, as they lie beside its weights. They are no items."""
JSON = "JsonSerialization"


@dataclass(frozen=True)
class ItemFiles:
    """The files of an item by rank, absolute, and their format. `stated`: what `metadata.pkl` says of it."""

    key: str
    files: Mapping[int, str]
    form: str = TORCH
    stated: StatedItem | None = None


def item_files(root: str, names: Sequence[str], metadata: StatedItems | None) -> list[ItemFiles]:
    """Return the items in the order in which they are read.

    Raise SourceError CKM110 if `metadata.pkl` lists a file that is missing, or a rank has two files, CKM116 if
    it lists a file outside the directory, CKM109 for another format of files with tensors.
    """
    where = str(FilePath(root) / METADATA)
    by_rank: dict[str, dict[int, str]] = {}
    alone: dict[str, ItemFiles] = {}
    stated = metadata.items if metadata is not None else {}
    layouts = {key: _listed_files(root, item, where) for key, item in stated.items()}
    taken = {file for files in layouts.values() for file in files.values()}
    for name in names:
        path = str(FilePath(root) / name)
        default, one = DEFAULT_FILE.fullmatch(name), _ONE_FILE.fullmatch(name)
        if path in taken or not isfile(path) or _BESIDE_WEIGHTS.fullmatch(name):
            continue
        if default is not None:
            by_rank.setdefault(default["key"], {})[int(default["rank"])] = path
        elif one is not None:
            form = JSON if name.endswith(".json") else TORCH
            alone.setdefault(one["key"], ItemFiles(one["key"], {0: path}, form))
    items = [
        _stated_item(key, item, layouts[key], by_rank.pop(key, {}), where)
        for key, item in stated.items()
    ]
    items += [ItemFiles(key, files) for key, files in by_rank.items()]
    known = {item.key for item in items}
    return [*items, *(item for key, item in alone.items() if key not in known)]


def _listed_files(root: str, item: StatedItem, where: str) -> dict[int, str]:
    """Return the files at the paths that `metadata.pkl` lists."""
    files = {}
    for rank, (name, _) in sorted(item.layouts.items()):
        files[rank] = inside(root, name, where)
        if not isfile(files[rank]):
            raise incomplete(root, f"{name}, which {METADATA} lists for rank {rank}, is missing")
    return files


def _stated_item(
    key: str, item: StatedItem, listed: Mapping[int, str], default: Mapping[int, str], where: str
) -> ItemFiles:
    forms = {form for _, form in item.layouts.values()} or {TORCH}
    if not forms <= {TORCH, SAFETENSORS} or len(forms) > 1 or (default and forms != {TORCH}):
        found = sorted(forms | ({TORCH} if default else set()))
        raise SourceError(
            "CKM109",
            f"{where}: item {key!r}: files of {' and '.join(found)}, expected {TORCH} or {SAFETENSORS}",
            "copy the directory again, or save the item with one of these layouts",
        )
    twice = next((rank for rank in default if rank in listed), None)
    if twice is not None:
        raise SourceError(
            "CKM110",
            f"{default[twice]}: rank {twice} of item {key!r}, for which {METADATA} lists {listed[twice]}",
            "move the one that an earlier save left here to another directory",
        )
    return ItemFiles(key, {**listed, **default}, forms.pop(), item)


def check_ranks(root: str, items: Sequence[ItemFiles], world: int, of_all: Collection[str]) -> None:
    """Raise SourceError CKM110 unless each item has the files of all ranks, or of a single one, which wrote
    it for all. `of_all`: the keys of items whose tensors say that all ranks wrote them."""
    for item in items:
        extra = [rank for rank in sorted(item.files) if rank >= world]
        if extra:
            raise SourceError(
                "CKM110",
                f"{item.files[extra[0]]}: rank {extra[0]}, expected ranks below {world}",
                "move files that an earlier save of more ranks left here to another directory",
            )
        missing = [rank for rank in range(world) if rank not in item.files]
        if not missing or (len(item.files) == 1 and not (item.key in of_all or _is_cut(item))):
            continue
        lost = [f"{item.key}_{rank}.pt" for rank in missing]
        raise incomplete(
            root,
            f"item {item.key!r}: the files of {counted(len(item.files), 'rank')} of {world} are here,"
            f" and {counted(len(missing), 'file')} missing: {some(lost)}",
        )


def _is_cut(item: ItemFiles) -> bool:
    """Return whether `metadata.pkl` says that ranks hold different parts of a tensor of the item."""
    ways = item.stated.tensors.values() if item.stated else ()
    return any(one.cuts and len(one.mesh.places) > 1 for of_tensor in ways for one in of_tensor)


def incomplete(root: str, problem: str) -> SourceError:
    """Return the error for a save of which files are missing. The name of the directory tells whether the save
    has ended."""
    name = FilePath(root).name
    if name.startswith(UNFINISHED):
        return SourceError(
            "CKM110",
            f"{root}: {problem}; torch_checkpointing names a save {name} until all ranks have written"
            " it, so this one was killed half way or still runs",
            "use an earlier checkpoint",
        )
    return SourceError(
        "CKM110",
        f"{root}: {problem}",
        "copy the files of all ranks of one save into this directory",
    )


def left_aside(root: str, names: Sequence[str], used: set[str]) -> tuple[str, ...]:
    """Return the entries that no item reads: raw files, consolidated copies, folders of nothing listed."""
    parents = {FilePath(file).relative_to(root).parts[0] for file in used}
    return tuple(
        name
        for name in names
        if name not in parents and not name.startswith(".") and not _BESIDE_WEIGHTS.fullmatch(name)
    )
