"""A Hugging Face directory of before safetensors: `pytorch_model-00001-of-00002.bin` and its index.

Each shard is one torch.save file of a flat state dict. A lone `pytorch_model.bin` needs no index.
With an index the name is anybody's: diffusers writes `diffusion_pytorch_model.bin.index.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.state_tree import flatten
from ckptmap.errors import SourceError
from ckptmap.formats.huggingface.shard_index import parse_index
from ckptmap.formats.safetensors.file import refuse_text
from ckptmap.formats.torch_save.reader import load
from ckptmap.protocols import Index, Place, in_saved_order
from ckptmap.storage.files import Files
from ckptmap.storage.safe_names import blobs_of, inside
from ckptmap.tensors import Leaf, Path

FIRST = "pytorch_model.bin.index.json"
INDEX = re.compile(r".+\.bin\.index(\.[^.]+)?\.json")
"""A variant of weights has its name in that of the index: `X.bin.index.fp16.json`."""
SHARD = re.compile(r"pytorch_model-(\d{5})-of-(\d{5})\.bin")


class HfBin:
    """Reads the shards that the index lists, or without one a set that is complete by its names."""

    name = "hf-bin"

    def claims(self, place: Place) -> bool:
        return place.is_dir and bool(_indexes(place) or any(map(SHARD.fullmatch, place.names)))

    def index(self, place: Place) -> Index:
        """Raises SourceError CKM108 where index and shards disagree, CKM116 where a name leads out
        of the directory, and what a malformed shard raises."""
        root = str(FilePath(place.path).absolute())
        index = _pick_index(place)
        where = root if index is None else str(FilePath(root) / index)
        listed = None if index is None else parse_index(where).weight_map
        names = _complete_set(place) if listed is None else dict.fromkeys(listed.values())
        shards = [inside(root, name, where, blobs_of(root)) for name in names]
        with paused_gc():
            leaves = _leaves(shards, listed, where)
        files = (*shards, where) if listed is not None else (*shards,)
        # Of several, no: save_pretrained gives a large tensor a shard of its own, before its place.
        return Index(
            self.name, leaves, files, keeps_order=in_saved_order if len(shards) == 1 else None
        )


def _indexes(place: Place) -> list[str]:
    return [name for name in place.names if INDEX.fullmatch(name)]


def _pick_index(place: Place) -> str | None:
    """None: there is none. Raises SourceError CKM108 where there are several, none of them
    transformers' own."""
    indexes = _indexes(place)
    if len(indexes) < 2 or FIRST in indexes:
        return FIRST if FIRST in indexes else next(iter(indexes), None)
    raise SourceError(
        "CKM108",
        f"{place.path}: several indexes, expected one: {', '.join(indexes)}",
        "move the others away",
    )


def _complete_set(place: Place) -> list[str]:
    """The names of a set whose index is not there. Raises SourceError CKM108 for two sets."""
    counts = {int(match[2]) for match in map(SHARD.fullmatch, place.names) if match}
    if len(counts) > 1:
        raise SourceError(
            "CKM108",
            f"{place.path}: shards of {len(counts)} sets and no index, expected one set",
            "put each set in a directory of its own",
        )
    (count,) = counts
    return [f"pytorch_model-{number:05d}-of-{count:05d}.bin" for number in range(1, count + 1)]


def _leaves(
    shards: Sequence[str], listed: Mapping[str, str] | None, where: str
) -> dict[Path, Leaf]:
    leaves: dict[Path, Leaf] = {}
    for shard in shards:
        name = FilePath(shard).name
        if not FilePath(shard).is_file():
            raise SourceError(
                "CKM108", f"{where}: {name!r} of its shards is not there", "finish the download"
            )
        refuse_text(Files(), shard)
        loaded = load(Files(), shard)
        for path, leaf in flatten(loaded.tree, shard, loaded.pickle_nbytes).items():
            home = name if listed is None else listed.get(".".join(map(str, path)))
            if path in leaves or home != name:
                raise SourceError(
                    "CKM108",
                    f"{where}: {'.'.join(map(str, path))!r} is stored in {name!r}, expected"
                    f" {'one shard only' if path in leaves else repr(home)}",
                    "the shards are not of one save; download them again",
                )
            leaves[path] = leaf
    absent = [key for key in listed or () if (key,) not in leaves]
    if absent:
        raise SourceError(
            "CKM108", f"{where}: {absent[0]!r} is in no shard", "download the shards again"
        )
    return leaves
