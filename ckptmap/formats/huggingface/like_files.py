"""What the files of a Hugging Face directory keep of the checkpoint of `--as`: their split, the text of the index, and the
words that its writer put into `__metadata__` of each file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from ckptmap.core.json_text import JsonError, parse_json, parse_object
from ckptmap.errors import SourceError
from ckptmap.formats.huggingface.shard_index import (
    INDEX_SUFFIX,
    MAX_INDEX_NBYTES,
    SHARD,
    emit_index,
    total_size,
)
from ckptmap.formats.safetensors.file import words_of
from ckptmap.formats.safetensors.header import parse
from ckptmap.protocols import CarriedFile
from ckptmap.protocols.file_systems import ReadsFiles
from ckptmap.storage.files import Files
from ckptmap.storage.sidecar import Sidecar


class LikeFiles(ReadsFiles):
    """Gives the writer what the checkpoint of `--as` tells besides tensors: its index, and the words of each file."""

    def files(
        self, siblings: Sequence[str], given: str | None, source: str | None, like: str | None
    ) -> tuple[Mapping[str, Sidecar], list[str]]:
        """Return the index of the directory `like`, and a JSON object of each shard, by their names; nothing without one."""
        if like is None:
            return {}, []
        indexes = sorted(Path(like).glob(f"*{INDEX_SUFFIX}"))
        found = {file.name: Sidecar.at(str(file), self.mounts) for file in indexes}
        with closing(Files(mounts=self.mounts)) as files:
            for file in sorted(Path(like).glob("*.safetensors")):
                with suppress(SourceError):  # a damaged file that is no part of the checkpoint
                    words = words_of(parse(files, str(file)))
                    found[file.name] = Sidecar.made(json.dumps(words).encode())
        return found, []


def like_index(theirs: CarriedFile | None, weight_map: Mapping[str, str], total: int) -> bytes:
    """Return the text of another checkpoint's index where it is true of these files, else one of our own."""
    if theirs is not None and theirs.nbytes <= MAX_INDEX_NBYTES:
        text = theirs.read()
        with suppress(JsonError):
            tree = parse_json(text, max_nbytes=MAX_INDEX_NBYTES, allow_nan=False)
            same = isinstance(tree, dict) and tree.get("weight_map") == weight_map
            if same and total_size(tree) in (total, None):
                return text
    return emit_index(weight_map, total)


def split_alike(
    keys: Sequence[str], places: Mapping[str, tuple[str, int]]
) -> list[tuple[str, list[int]]]:
    """Return each file of `places`, by its name, with the positions of its tensors in their order there.

    Return an empty list if a key has no place, or the files are not of one directory of safetensors.
    """
    if not keys or not places.keys() >= set(keys):
        return []
    files: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        files.setdefault(places[key][0], []).append(position)
    names = {file: Path(file).name for file in files}
    numbered = [SHARD.fullmatch(name) for name in names.values()]
    alike = len(names) == 1 or (all(numbered) and len({m and m["stem"] for m in numbered}) == 1)
    if not alike or not all(name.endswith(".safetensors") for name in names.values()):
        return []
    return [
        (names[file], sorted(files[file], key=lambda i: places[keys[i]][1]))
        for file in sorted(files, key=lambda file: names[file])
    ]


def like_words(
    inner: Mapping[str, CarriedFile], places: Mapping[str, tuple[str, int]]
) -> dict[str, dict[str, str]]:
    """Return file name -> the words of each file that holds a tensor of `places`; `inner` is what `LikeFiles` gave."""
    names = {Path(file).name for file in {file for file, _ in places.values()}}
    held = {name: parse_object(inner[name].read()) for name in sorted(names & inner.keys())}
    return {name: {k: str(v) for k, v in words.items()} for name, words in held.items()}
