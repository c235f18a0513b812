"""A Hugging Face directory of before safetensors: `pytorch_model-00001-of-00002.bin` and its index.

Each shard is one torch.save file of a flat state dict. A lone `pytorch_model.bin` needs no index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

from ckptmap.errors import SourceError
from ckptmap.files import Files
from ckptmap.protocols import Place
from ckptmap.tensors import Index, Leaf, Path
from ckptmap.wire.gc_pause import paused_gc
from ckptmap.wire.hf_index import parse_index
from ckptmap.wire.inside import blobs_of, inside
from ckptmap.wire.safetensors_file import refuse_text
from ckptmap.wire.torch_zip_read import load
from ckptmap.wire.tree import flatten

INDEX = "pytorch_model.bin.index.json"


class HfBin:
    """Reads the shards that the index lists."""

    name = "hf-bin"

    def claims(self, place: Place) -> bool:
        return place.is_dir and INDEX in place.names

    def index(self, place: Place) -> Index:
        """Raises SourceError CKM108 where index and shards disagree, CKM116 where a name leads out
        of the directory, and what a malformed shard raises."""
        root = str(FilePath(place.path).absolute())
        where = str(FilePath(root) / INDEX)
        listed = parse_index(where).weight_map
        shards = [
            inside(root, name, where, blobs_of(root)) for name in dict.fromkeys(listed.values())
        ]
        with paused_gc():
            leaves = _leaves(shards, listed, where)
        return Index(self.name, leaves, (*shards, where))


def _leaves(shards: Sequence[str], listed: Mapping[str, str], where: str) -> dict[Path, Leaf]:
    leaves: dict[Path, Leaf] = {}
    for shard in shards:
        name = FilePath(shard).name
        if not FilePath(shard).is_file():
            raise SourceError(
                "CKM108", f"{where}: lists {name!r}, which is not there", "finish the download"
            )
        refuse_text(Files(), shard)
        loaded = load(Files(), shard)
        for path, leaf in flatten(loaded.tree, shard, loaded.pickle_nbytes).items():
            home = listed.get(".".join(map(str, path)))
            if path in leaves or home != name:
                raise SourceError(
                    "CKM108",
                    f"{where}: {'.'.join(map(str, path))!r} is stored in {name!r}, expected"
                    f" {'one shard only' if path in leaves else repr(home)}",
                    "the shards are not of one save; download them again",
                )
            leaves[path] = leaf
    absent = [key for key in listed if (key,) not in leaves]
    if absent:
        raise SourceError(
            "CKM108", f"{where}: {absent[0]!r} is in no shard", "download the shards again"
        )
    return leaves
