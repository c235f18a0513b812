"""Refuse a Hugging Face directory whose weights are not all there, and say how to complete it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path as FilePath

from ckptmap.core.printable import join, quote
from ckptmap.errors import CkptmapError, SourceError
from ckptmap.formats.huggingface.shard_index import ShardIndex
from ckptmap.formats.safetensors.header import parse
from ckptmap.protocols import Mounts, Place
from ckptmap.storage.files import Files
from ckptmap.storage.json_file import why_no_file
from ckptmap.storage.safe_names import is_file

SUFFIX = ".safetensors"
LINK = "; the folder has a link to it, and no file is there"
WHOLE = "finish the download; a model is converted only if all of its shards are here"
TRIED = 32
"""How many files are read to find a missing shard under another name."""
NAME_MAX = 255
"""Bytes of the longest name that file systems take: no file can be given a longer one."""


LEFT_BEHIND = "not read, because all shards that it lists are gone: "
LOADED_FIRST = ("model.safetensors", "pytorch_model.bin")
"""Files that transformers loads before it looks for an index."""


def is_left_behind(place: Place, where: str, shards: Collection[str], one_file: str) -> bool:
    """Return True if the index at `where` is of an earlier save than `one_file`, whose name is that of a save in
    one piece, and which is here: save_pretrained removes the shards, but not the index. Raise SourceError CKM108 if shards of the
    index and that file are both here, because libraries differ in which of them they load."""
    if one_file in shards:
        return False
    present = [shard for shard in shards if is_file(FilePath(place.path) / shard)]
    if present:
        who = "which transformers loads, " if one_file in LOADED_FIRST else ""
        raise SourceError(
            "CKM108",
            f"{where}: expected one save, found two saves: the index lists {present[0]!r}, and"
            f" {one_file!r}, {who}is here too",
            "move the weights of one save to another directory, or give the path"
            f" {quote(str(FilePath(place.path) / one_file))}",
        )
    return True


def require_all(
    root: str, shards: Sequence[str], where: str, mounts: Mounts,
    listed: ShardIndex | None = None,
) -> None:  # fmt: skip
    """Raise SourceError CKM108 where one of the shards is missing.

    If another file holds the tensors that the index lists for it, the hint is the command that renames that file.
    """
    absent = [shard for shard in shards if not is_file(FilePath(root) / shard)]
    if not absent:
        return
    first, more = repr(absent[0]), f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    subject = f"of {len(shards)} shards, {first}{more}" if len(shards) > 1 else f"the file {first}"
    link = LINK if why_no_file(FilePath(root) / absent[0]) else ""
    renamed = _renamed(
        root, shards, absent, mounts, listed.weight_map if listed is not None else {}
    )
    raise SourceError(
        "CKM108",
        f"{where}: {subject} {'are' if more else 'is'} missing{link}",
        f"they are here under other names: {renamed}" if renamed else WHOLE,
    )


def _renamed(
    root: str,
    shards: Sequence[str],
    absent: Sequence[str],
    mounts: Mounts,
    weight_map: Mapping[str, str],
) -> str:
    """Return the commands that give all absent shards their names again; "" where one is not here."""
    if (
        not weight_map
        or len(absent) > TRIED
        or any(len(os.fsencode(one)) > NAME_MAX for one in absent)
    ):
        return ""
    held = _keys_of_others(root, shards, mounts)
    moves = []
    for shard in absent:
        wanted = frozenset(key for key, home in weight_map.items() if home == shard)
        file = held.get(wanted)
        if file is None:
            return ""
        moves.append(join(["mv", file, str(FilePath(root) / shard)]))
    return " && ".join(moves)


def _keys_of_others(root: str, shards: Sequence[str], mounts: Mounts) -> dict[frozenset[str], str]:
    """Return keys -> path of the safetensors files in `root` that are none of `shards`."""
    listed = set(shards)
    others = [
        file
        for file in sorted(FilePath(root).iterdir())
        if file.name.endswith(SUFFIX) and file.name not in listed and file.is_file()
    ]
    held = {}
    with closing(Files(mounts=mounts)) as files:
        for file in others[:TRIED]:
            try:
                held[frozenset(parse(files, str(file)).keys)] = str(file)
            except CkptmapError:  # no shard of a model, or one that is damaged
                continue
    return held
