"""Read a Hugging Face directory from before safetensors: shards that torch.save wrote, and their index.

    pytorch_model-00001-of-00002.bin    a torch.save file of a flat state dict
    pytorch_model.bin.index.json        {"weight_map": {tensor name: shard file name}}

A single `pytorch_model.bin` has no index and is read as a plain torch.save file, unless an earlier save has left
its index behind. If there is an index,
the files may have any name: diffusers writes `diffusion_pytorch_model.bin.index.json`.
Source: transformers and diffusers, `save_pretrained(safe_serialization=False)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

from ckptmap.core.formatting import some
from ckptmap.core.state_tree import flatten
from ckptmap.errors import SourceError
from ckptmap.formats.huggingface.missing_shards import LEFT_BEHIND, is_left_behind
from ckptmap.formats.huggingface.shard_index import parse_index
from ckptmap.formats.safetensors.file import refuse_text
from ckptmap.formats.torch_save.reader import load
from ckptmap.protocols import Index, Place, in_saved_order
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.files import Files
from ckptmap.storage.safe_names import blobs_of, inside, is_file
from ckptmap.tensors import Leaf, Path

FIRST = "pytorch_model.bin.index.json"
INDEX = re.compile(r"(.+)\.bin\.index(\.[^.]+)?\.json")
"""A variant of the weights puts its name into that of the index: `X.bin.index.fp16.json`."""
SHARD = re.compile(r"pytorch_model-(\d{5})-of-(\d{5})\.bin")


class HfBin:
    """Reads the shards that the index lists. Without an index, it reads a set of shards whose names say
    that none is missing."""

    name = "hf-bin"

    def claims(self, place: Place) -> bool:
        """Return True for a directory with an index or a shard of this kind."""
        return place.is_dir and bool(_indexes(place) or any(map(SHARD.fullmatch, place.names)))

    def index(self, place: Place) -> Index:
        """Return the tensors of all shards.

        Raise SourceError CKM108 if index and shards disagree or a shard is missing, CKM116 if a name
        leads out of the directory, and the errors of `torch_save.reader.load` for a malformed shard.
        """
        root = str(FilePath(place.path).absolute())
        index = _pick_index(place)
        where = root if index is None else str(FilePath(root) / index)
        listed = None if index is None else parse_index(where, place.mounts).weight_map
        names = _complete_set(place) if listed is None else [*dict.fromkeys(listed.values())]
        notes: tuple[str, ...] = ()
        one_file = _one_file(index or "")
        if one_file in place.names and is_left_behind(place, where, names, one_file):
            names, listed, notes = [one_file], None, (f"{LEFT_BEHIND}{index}",)
        shards = [inside(root, name, where, blobs_of(root)) for name in names]
        leaves = _leaves(shards, listed, where, place.mounts)
        files = (*shards, where) if listed is not None else (*shards,)
        # Several shards do not keep the order of the state dict: save_pretrained puts a tensor that is
        # larger than a shard into a shard of its own, before tensors that come earlier.
        return Index(
            self.name, leaves, files, keeps_order=in_saved_order if len(shards) == 1 else None,
            notes=notes,
        )  # fmt: skip


def _indexes(place: Place) -> list[str]:
    return [name for name in place.names if INDEX.fullmatch(name)]


def _one_file(index: str) -> str:
    """Return the name of the weights in one piece: X.bin.index.fp16.json -> X.fp16.bin."""
    return INDEX.sub(lambda match: f"{match[1]}{match[2] or ''}.bin", index)


def _pick_index(place: Place) -> str | None:
    """Return the name of the index; None if there is none. Raise SourceError CKM108 if there are several
    and none is that of transformers."""
    indexes = _indexes(place)
    if len(indexes) < 2 or FIRST in indexes:
        return FIRST if FIRST in indexes else next(iter(indexes), None)
    raise SourceError(
        "CKM108",
        f"{place.path}: expected one index, found {len(indexes)}: {some(indexes)}",
        "move all but one of them to another directory",
    )


def _complete_set(place: Place) -> list[str]:
    """Return the names of all shards of a set without index. Raise SourceError CKM108 for two sets."""
    counts = {int(match[2]) for match in map(SHARD.fullmatch, place.names) if match}
    if len(counts) > 1:
        raise SourceError(
            "CKM108",
            f"{place.path}: expected an index or one set of shards, found shards of {len(counts)} sets",
            "move each set into a directory of its own",
        )
    (count,) = counts
    return [f"pytorch_model-{number:05d}-of-{count:05d}.bin" for number in range(1, count + 1)]


def _leaves(
    shards: Sequence[str], listed: Mapping[str, str] | None, where: str, mounts: Mounts
) -> dict[Path, Leaf]:
    leaves: dict[Path, Leaf] = {}
    for shard in shards:
        name = FilePath(shard).name
        if not is_file(shard):
            raise SourceError(
                "CKM108", f"{where}: the shard {name!r} is missing", "finish the download"
            )
        files = Files(mounts=mounts)
        refuse_text(files, shard)
        loaded = load(files, shard)
        for path, leaf in flatten(loaded.tree, shard, loaded.pickle_nbytes).items():
            home = name if listed is None else listed.get(".".join(map(str, path)))
            if path in leaves or home != name:
                raise SourceError(
                    "CKM108",
                    f"{where}: {'.'.join(map(str, path))!r} is stored in {name!r}, expected"
                    f" {'one shard only' if path in leaves else repr(home)}",
                    "these are shards of different saves; download all of them again",
                )
            leaves[path] = leaf
    absent = [key for key in listed or () if (key,) not in leaves]
    if absent:
        raise SourceError(
            "CKM108",
            f"{where}: lists the tensor {absent[0]!r}, which no shard holds",
            "index and shards are of different saves; download all of them again",
        )
    return leaves
