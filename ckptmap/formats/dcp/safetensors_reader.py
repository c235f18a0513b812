"""Read the safetensors files of each rank that torch's `HuggingFaceStorageWriter` (DCP) writes.

    shard-RRRRR-model-IIIII-of-NNNNN.safetensors
        R       the rank, counted from 1
        I of N  the number of the file, from the writer's map of FQNs to files
        `__metadata__`: {"DCP_SHARDING_INFO": json {fqn: {"saved_offsets": [...]}}}

Each rank stores its chunk of a tensor under the tensor's FQN. No file holds the shape of the whole
tensor: it is computed as the end of the last chunk in each dimension. The number of ranks is not
stored either; `safetensors_ranks` looks for signs of a missing last rank. torch consolidates such
files into a plain Hugging Face directory and keeps them in its `sharded/`.
Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py, torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

from ckptmap.core.formatting import counted
from ckptmap.core.json_text import parse_object
from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import SourceError
from ckptmap.formats.dcp.safetensors_ranks import Part, contradiction, is_proven, rows_of
from ckptmap.formats.safetensors.file import records_of, refuse_text
from ckptmap.formats.safetensors.header import MAX_NUMEL, Header, parse
from ckptmap.protocols import Index, Place
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.reference_model import MANIFEST
from ckptmap.storage.files import Files
from ckptmap.storage.json_file import read_json
from ckptmap.storage.safe_names import inside, is_file
from ckptmap.tensors import Box, Chunk, Path, Region, StoredTensor, TensorInfo

NAME = re.compile(
    r"shard-(?P<rank>\d{5,})-model-(?P<file>\d{5,})-of-(?P<count>\d{5,})\.safetensors"
)
SHARDING = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
CONSOLIDATED = "sharded"


class DcpHf:
    """Reads the shards of all ranks, and joins the chunks of each tensor."""

    name = "dcp-hf"

    def claims(self, place: Place) -> bool:
        """Return True for a directory that holds a `shard-R-model-I-of-N.safetensors`."""
        return place.is_dir and any(NAME.fullmatch(name) for name in place.names)

    def index(self, place: Place) -> Index:
        """Return all tensors, each with the chunks of all ranks, and the number of ranks.

        Raise SourceError CKM110 if files of ranks are missing or belong to several saves, CKM112 if
        chunks overlap or leave holes, CKM113 if the chunks of a tensor differ in dtype, CKM107 for a
        header without offsets, CKM104 for a truncated file.
        """
        root = str(FilePath(place.path).absolute())
        names = [name for name in place.names if NAME.fullmatch(name)]
        ranks = _check_names(names, root)
        parts: dict[str, list[tuple[str, Chunk]]] = {}
        records: dict[str, Mapping[str, object]] = {}
        files = Files(mounts=place.mounts)
        try:
            paths = [inside(root, name, root) for name in names]
            for file in paths:
                refuse_text(files, file)
                header = parse(files, file)
                _read(header, file, parts)
                records |= records_of(header, file)
            leaves: dict[Path, StoredTensor] = {(k,): _joined(k, p, root) for k, p in parts.items()}
        finally:
            files.close()
        notes = _check_whole(parts, leaves, ranks, root, place.mounts)
        return Index(self.name, leaves, tuple(paths), records, world=ranks, notes=notes)


def _check_names(names: list[str], root: str) -> int:
    """Return the number of ranks. Raise SourceError CKM110 unless the ranks in the names are 1..R and
    the file numbers 1..N, both without a gap."""
    matches = [match for match in map(NAME.fullmatch, names) if match]
    counts = {int(match["count"]) for match in matches}
    if len(counts) > 1:
        raise SourceError(
            "CKM110",
            f"{root}: holds shards of several saves, one of"
            f" {' and one of '.join(map(str, sorted(counts)))} files",
            "move each save into a directory of its own",
        )
    for kind, group, last in (("rank", "rank", 0), ("file", "file", counts.pop())):
        present = {int(match[group]) for match in matches}
        missing = sorted(set(range(1, max(last, *present) + 1)) - present)
        if missing or min(present) < 1 or (last and max(present) > last):
            where = f"{kind} {missing[0]}" if missing else f"a {kind} in 1..{last}"
            raise SourceError(
                "CKM110",
                f"{root}: the shards of {where} are missing, found those of {counted(len(present), kind)}"
                f" up to {max(present)}",
                "copy the shards of all ranks into this directory",
            )
    return len({int(match["rank"]) for match in matches})


def _check_whole(
    parts: Mapping[str, Sequence[tuple[str, Chunk]]], leaves: Mapping[Path, StoredTensor], ranks: int,
    root: str, mounts: Mounts,
) -> tuple[str, ...]:  # fmt: skip
    """Return a note if nothing proves that the shards of all ranks are here. Raise SourceError CKM110
    if something proves that some are missing."""
    infos = {str(path[0]): leaf.info for path, leaf in leaves.items()}
    if _is_listed(root, mounts):
        return ()
    _check_consolidated(infos, root, mounts)
    rows = {}
    for key, chunks in parts.items():
        cut = rows_of(infos[key], [Part(_rank(c.region.file), c) for _, c in chunks], ranks)
        if cut is not None:
            rows[key] = cut
    contradicted = contradiction(infos, rows)
    if contradicted is not None:
        key, columns = contradicted
        raise _incomplete(
            f"{root}: {key} has {infos[key].shape[0]} elements, but most matrices have {columns}"
            f" columns: the shards of rank {ranks + 1} are missing, found those of {ranks} ranks"
        )
    if is_proven(rows.values(), ranks):
        return ()
    return (
        f"the shards do not record how many ranks wrote them; the files of {counted(ranks, 'rank')} are here,"
        " and a last rank could be missing, because all tensors are cut so that nothing would show it",
    )


def _is_listed(root: str, mounts: Mounts) -> bool:
    """Return True if ckptmap's own manifest lists shards. Raise SourceError CKM110 if a listed one is
    missing."""
    try:
        document = read_json(FilePath(root) / MANIFEST, mounts)
        listed = [name for name in document["files"] if NAME.fullmatch(name)]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    lost = next((name for name in listed if not is_file(FilePath(root) / name)), None)
    if lost is not None:
        raise _incomplete(f"{root}: {MANIFEST} lists {lost}, which is missing")
    return bool(listed)


def _check_consolidated(infos: Mapping[str, TensorInfo], root: str, mounts: Mounts) -> None:
    """Compare the shards in a `sharded/` with the consolidated files that torch writes around it. Raise
    SourceError CKM110 if a tensor differs in shape or dtype, or has no shards."""
    folder = FilePath(root)
    if folder.name != CONSOLIDATED:
        return
    files = Files(mounts=mounts)
    try:
        for file in sorted(folder.parent.glob("*.safetensors")):
            for key, (info, _, _) in parse(files, str(file)).tensors.items():
                if infos.get(key) != info:
                    raise _incomplete(
                        f"{root}: {key}: expected {info} as in the consolidated {file}, found"
                        f" {infos.get(key, 'no shard')}: shards are missing"
                    )
    finally:
        files.close()


def _rank(file: str) -> int:
    match = NAME.fullmatch(FilePath(file).name)
    assert match is not None, f"{file}: was claimed by its name"
    return int(match["rank"]) - 1


def _incomplete(problem: str) -> SourceError:
    return SourceError("CKM110", problem, "copy the shards of all ranks into this directory")


def _read(header: Header, file: str, parts: dict[str, list[tuple[str, Chunk]]]) -> None:
    """Append the chunks of a file to those of each tensor, with their dtypes."""
    sharding = _sharding(header, file)
    for key, (info, begin, _) in header.tensors.items():
        offsets = _offsets(sharding.get(key), info, key, file)
        region = Region.contiguous(file, begin, info.shape, info.itemsize)
        parts.setdefault(key, []).append((info.dtype, Chunk(Box(offsets, info.shape), region)))


def _sharding(header: Header, file: str) -> Mapping[str, object]:
    try:
        return parse_object(header.metadata.get(SHARDING, "null"))
    except ValueError as error:
        raise _bad(file, f"__metadata__[{SHARDING!r}], expected a JSON object: {error}") from error


def _offsets(entry: object, info: TensorInfo, key: str, file: str) -> tuple[int, ...]:
    offsets = entry.get(OFFSETS) if isinstance(entry, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != len(info.shape)
        or not all(type(o) is int and 0 <= o <= MAX_NUMEL for o in offsets)
    ):
        raise _bad(file, f"{key!r}: {OFFSETS}, expected {len(info.shape)} integers, got {entry!r}")
    return tuple(offsets)


def _joined(key: str, parts: list[tuple[str, Chunk]], root: str) -> StoredTensor:
    """Return the tensor whose chunks these are. Raise SourceError CKM112 unless they tile the shape that
    they span, CKM113 if they differ in dtype or number of dimensions."""
    first_dtype, first = parts[0]
    for dtype, chunk in parts[1:]:
        if dtype != first_dtype or len(chunk.box.sizes) != len(first.box.sizes):
            raise SourceError(
                "CKM113",
                f"{chunk.region.file}: {key!r} is {dtype}{list(chunk.box.sizes)}, but in "
                f"{FilePath(first.region.file).name} it is {first_dtype}{list(first.box.sizes)}",
                "these are shards of different saves; copy all shards of one save",
            )
    chunks = [chunk for _, chunk in parts]
    boxes = [chunk.box for chunk in chunks]
    shape = tuple(
        max(box.offsets[d] + box.sizes[d] for box in boxes) for d in range(len(first.box.sizes))
    )
    wrong = prove_tiling(shape, boxes)
    if wrong is not None:
        raise SourceError(
            "CKM112",
            f"{root}: tensor {key!r}: {wrong}, expected chunks that tile {list(shape)}",
            "a rank's shards are missing or of another save; copy all shards of one save",
        )
    return StoredTensor(TensorInfo(shape, first_dtype), chunks)


def _bad(file: str, problem: str) -> SourceError:
    return SourceError(
        "CKM107", f"{file}: bad DCP shard: {problem}", "save again, or copy the file again"
    )
