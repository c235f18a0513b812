"""Open and write a Hugging Face model directory: safetensors shards and the index that lists them.

    model-00001-of-00002.safetensors    tensors; a model of one shard is model.safetensors, without index
    model.safetensors.index.json        {"weight_map": {tensor name: shard file name}}
    config.json, tokenizer files        copied beside the output (`carrier`)

Source: transformers `save_pretrained`, and the "Format" of huggingface/safetensors.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from pathlib import Path as FilePath

from ckptmap.core.columns import distinct, each
from ckptmap.core.formatting import counted, some
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.slot_columns import OutTensors, Slots
from ckptmap.core.state_paths import joined
from ckptmap.core.tensor_columns import PlainTensors, nbytes_of
from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.huggingface.carrier import (
    DIFFUSERS_STEM,
    MODULES,
    HfCarrier,
    weights_of_modules,
)
from ckptmap.formats.huggingface.like_files import LikeFiles, like_index, like_words, split_alike
from ckptmap.formats.huggingface.missing_shards import LEFT_BEHIND, is_left_behind, require_all
from ckptmap.formats.huggingface.shard_index import (
    INDEX_SUFFIX,
    SHARD,
    ShardIndex,
    parse_index,
    shard_name,
    split_shards,
)
from ckptmap.formats.huggingface.shards import read_listed, read_shards
from ckptmap.formats.safetensors import torchao_metadata
from ckptmap.formats.safetensors.file import (
    RECORDS,
    held_records,
)
from ckptmap.formats.safetensors.header_writer import emit
from ckptmap.protocols import Index, OutFile, OutState, Place, Setup
from ckptmap.protocols.writing import SHARD_NBYTES
from ckptmap.tensors import Box, Path

SUFFIX = ".safetensors"
ONE_FILE = "model.safetensors"
DIFFUSERS_FILE = f"{DIFFUSERS_STEM}.safetensors"
"""The file that transformers prefers to any index beside it."""
DCP_SHARD = re.compile(r"shard-\d+-.+\.safetensors")
"""A file of torch's HuggingFaceStorageWriter: it holds one rank's chunks, under the names of whole
tensors (`formats.dcp.safetensors_reader`)."""
OTHER_FORM = re.compile(
    r"((diffusion|open_clip)_)?pytorch_model([-.]\w+)*\.bin|(tf|flax|rust)_model([-.]\w+)*\.(h5|msgpack|ot)"
)
"""Weights in other formats. Libraries ignore them beside safetensors; an earlier save may have left
them."""
OF_TRAINING = re.compile(
    r"(optim(izer)?|scheduler|scaler|rng_state|random_states?)([-_.]\w+)*\.(pt|pth|bin|pkl)"
)
"""What a training loop saved beside the weights; a directory of a known framework is read by its own module."""
UNFINISHED = re.compile(r".*\.(incomplete|part|partial|tmp|crdownload|aria2)[^.]*")

HF = Setup(
    "hf",
    layout="full",
    writer="hf",
    holds_extra=False,
    carrier=HfCarrier(),
    inner=LikeFiles(),
    live="plain",
    summary="Hugging Face directory: safetensors shards, index, config and tokenizer",
)


class HfDirectory:
    """Reads a directory of safetensors shards; the index lists those that belong to the model."""

    name = "hf"

    def claims(self, place: Place) -> bool:
        """Return True for an index, a shard set, `model.safetensors`, or a single safetensors file."""
        return place.is_dir and bool(_index_names(place.names) or _without_index(place.names))

    def index(self, place: Place) -> Index:
        """Return the tensors of all shards, their encoding records, and notes on files that are not read.

        Raise SourceError CKM108 if index and shards disagree or a shard is missing, CKM116 if a name or
        link leads out of the directory, CKM102 to CKM104 or CKM107 for a malformed shard, CKM115 for
        malformed encoding records.
        """
        root = str(FilePath(place.path).absolute())
        index_file = _pick_index(place)
        notes: list[str] = []
        shards: Sequence[str]
        with paused_gc():
            if index_file is None:
                shards = _complete_set(place)
                leaves, records, files, _ = read_shards(root, shards, root, place.mounts)
            else:
                listed = parse_index(str(FilePath(root) / index_file), place.mounts)
                where = str(FilePath(root) / index_file)
                one_file = index_file.removesuffix(INDEX_SUFFIX) + SUFFIX
                if one_file in place.names and is_left_behind(
                    place, where, listed.shards, one_file
                ):
                    shards = [one_file]
                    leaves, records, files, _ = read_shards(root, shards, root, place.mounts)
                    notes.append(LEFT_BEHIND + index_file)
                else:
                    shards, contents = read_listed(root, listed, place.names, where, place.mounts)
                    leaves, records, files, held = contents
                    notes += _compare(leaves, listed, held)
                    files = (*files, where)
        notes += _unread(place.names, shards)
        missing = weights_of_modules(root, place.mounts) if MODULES in place.names else ()
        beside = (n for n in place.names if OTHER_FORM.fullmatch(n) or OF_TRAINING.fullmatch(n))
        unread = (*beside, *missing)
        return Index(
            self.name,
            leaves,
            files,
            records=records,
            notes=tuple(notes),
            unread_files=unread,
            missing_weights=missing,
        )


def _index_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(INDEX_SUFFIX)]


def _without_index(names: Iterable[str]) -> list[str]:
    """Return the files that may be the weights if there is no index. Return an empty list if the
    directory is of another format."""
    files = [n for n in names if n.endswith(SUFFIX) and not DCP_SHARD.fullmatch(n)]
    numbered = [name for name in files if SHARD.fullmatch(name)]
    for name in (ONE_FILE, DIFFUSERS_FILE):  # a variant may lie beside: X.fp16.safetensors
        if name in files:
            return [name]
    if numbered:
        return numbered
    return files if len(files) == 1 and "adapter_config.json" not in names else []


def _pick_index(place: Place) -> str | None:
    indexes = _index_names(place.names)
    if len(indexes) < 2:
        return indexes[0] if indexes else None
    for stem in ("model", DIFFUSERS_STEM):
        if stem + INDEX_SUFFIX in indexes:
            return stem + INDEX_SUFFIX
    raise SourceError(
        "CKM108",
        f"{place.path}: expected one index, found {len(indexes)}: {some(indexes)}",
        "move all but one of them to another directory",
    )


def _complete_set(place: Place) -> list[str]:
    """Return the files of a set without index. Raise SourceError CKM108 if some are missing."""
    names = _without_index(place.names)
    matches = [match for match in map(SHARD.fullmatch, names) if match]
    if not matches:
        return names
    sets = {(match["stem"], int(match["count"])) for match in matches}
    if len(sets) > 1:
        raise SourceError(
            "CKM108",
            f"{place.path}: expected an index or one set of shards, found shards of {len(sets)} sets",
            "move each set into a directory of its own",
        )
    stem, count = sets.pop()
    wanted = [shard_name(stem, i + 1, count) for i in range(count)] if count > 1 else names
    require_all(place.path, wanted, place.path, place.mounts)
    return wanted


def _compare(leaves: PlainTensors, listed: ShardIndex, held: int) -> list[str]:
    """Return notes on harmless differences between an index and the shards, which hold all that it lists.

    held  the bytes of their tensors
    """
    notes = []
    if len(leaves.names) > listed.count:
        unlisted = [key for key in leaves.names if key not in listed.weight_map]
        notes.append(
            f"the index does not list {counted(len(unlisted), 'stored tensor')}: {unlisted[0]}"
        )
    if listed.total_nbytes is not None and listed.total_nbytes != held:
        notes.append(f"the index gives total_size {listed.total_nbytes}, the shards hold {held}")
    return notes


def _unread(names: Sequence[str], shards: Sequence[str]) -> list[str]:
    """Return notes on the files that look like weights and are not part of the checkpoint."""
    stale = [n for n in names if n.endswith(SUFFIX) and n not in shards]
    unfinished = [n for n in names if UNFINISHED.fullmatch(n)]
    notes = [f"not read, because no index lists it: {name}" for name in stale]
    return notes + [f"not read, because its download is unfinished: {name}" for name in unfinished]


# -------------------------------------------------------------------------------- writing


class HfWriter:
    """Writes safetensors shards and their index.

    A key is the path segments joined with dots. A tensor with `alias_of` is not written; to write both
    names of a tie, pass both without it. `state.extra` must be empty: safetensors holds only tensors.

    The files are named `model*`, or `{state.stem}*` for a library that expects another name. If
    `state.records` has encodings that only ckptmap reads, they are named `ckptmap*`. Then transformers
    raises an error because it finds no weights. Under `model*`, it would find no weight that it knows,
    and initialise all of them at random. A record with the key "native" names the library that reads
    its encoding, and does not count.
    """

    name = "hf"
    one_file = False
    shares_storage = False

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the shards in order, then the index if there are several. Raise PlanError CKM114 if two
        tensors have one key, CKM203 for a dtype that safetensors lacks."""
        with paused_gc():
            return self._files(state)

    def _files(self, state: OutState) -> list[OutFile]:
        assert not state.extra, "safetensors has no place for what is not a tensor"
        own = any(not record.get("native") for record in state.records.values())
        stem = "ckptmap" if own else state.stem or "model"
        tensors = _not_aliased(OutTensors.of(state.tensors))
        keys, infos = _unique_keys(tensors.paths), tensors.infos()
        sizes = nbytes_of(infos)
        named = split_alike(keys, state.places)
        kept_order = bool(named)
        if not named:
            shards = split_shards(sizes, state.max_shard_nbytes or SHARD_NBYTES) or [[]]
            named = [(shard_name(stem, n, len(shards)), s) for n, s in enumerate(shards, 1)]
        weight_map: dict[str, str] = {}
        about = torchao_metadata.write(state.records, keys)
        words = like_words(state.inner, state.places)
        common = {"format": "pt", **_common(words.values())}
        item_nbytes = each(infos, lambda info: info.itemsize)
        is_in_order = kept_order or len({*item_nbytes}) < 2
        files = []
        for file, shard in named:
            if not is_in_order:
                shard = sorted(shard, key=item_nbytes.__getitem__, reverse=True)
            shard_keys = list(map(keys.__getitem__, shard))
            weight_map.update(zip(shard_keys, repeat(file), strict=False))
            held, nbytes = tensors.take(shard), list(map(sizes.__getitem__, shard))
            stated = {**(words.get(file, common) if kept_order else common), **about}
            files.append(_shard_file(file, shard_keys, held, nbytes, state.records, stated))
        if len(named) > 1:
            stem = numbered["stem"] if (numbered := SHARD.fullmatch(named[0][0])) else stem
            file = stem + INDEX_SUFFIX
            index = like_index(state.inner.get(file), weight_map, sum(sizes))
            files.append(OutFile(file, len(index), (), _sealed(index)))
        return files


def _not_aliased(tensors: OutTensors) -> OutTensors:
    if all(form.alias_of is None for form in distinct(tensors.forms).values()):
        return tensors
    return tensors.take([i for i, form in enumerate(tensors.forms) if form.alias_of is None])


def _unique_keys(paths: Sequence[Path]) -> list[str]:
    keys = joined(paths)
    if len(set(keys)) != len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise PlanError(
            "CKM114", f"two tensors would be written as {twice!r}", "drop or rename one of them"
        )
    return keys


def _common(of_files: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries that all files have, in the order of the first."""
    first, *others = [*of_files] or [{}]
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}


def _shard_file(
    name: str,
    keys: Sequence[str],
    tensors: OutTensors,
    sizes: Sequence[int],
    records: Mapping[str, Mapping[str, object]],
    stated: Mapping[str, str],
) -> OutFile:
    """Return one shard. `stated` is its metadata besides the records.

    Its tensors come by falling element size, so that each is aligned in a file that is mapped into
    memory, unless their order is kept.
    """
    metadata = dict(stated)
    held = held_records(records, keys) if records else {}
    if held:
        metadata[RECORDS] = json.dumps(held, sort_keys=True, separators=(",", ":"))
    infos = tensors.infos()
    header = emit(keys, infos, metadata)
    *offsets, end = accumulate(sizes, initial=len(header))
    boxes = each(infos, lambda info: Box.whole(info.shape))
    return OutFile(name, end, Slots(tensors.paths, boxes, offsets, sizes), _sealed(header))


def _sealed(start: bytes) -> Callable[[Sequence[int], bytes | None], Iterable[tuple[int, bytes]]]:
    return lambda crcs, manifest: ((0, start),)
