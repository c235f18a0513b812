"""DCP in safetensors form: torch's HuggingFaceStorageWriter, every rank its own shards.

    shard-RRRRR-model-IIIII-of-NNNNN.safetensors
        R  the rank, counted from 1; I of N  the file that a mapping puts a tensor into
        `__metadata__`: {"DCP_SHARDING_INFO": json {fqn: {"saved_offsets": [...]}}}

A tensor's parts lie under its whole name in several files; its shape is said nowhere and is what
the parts reach. What still tells of a last rank that is missing is in `safetensors_ranks`.
Source: torch 2.13, torch/distributed/checkpoint/hf_storage.py and _hf_utils.py. A consolidated
directory is a plain Hugging Face one, whose `sharded/` holds such files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import SourceError
from ckptmap.formats.dcp.safetensors_ranks import Part, contradiction, is_proven, rows_of
from ckptmap.formats.safetensors.file import records_of, refuse_text
from ckptmap.formats.safetensors.header import MAX_NUMEL, Header, parse
from ckptmap.protocols import Index, Place
from ckptmap.sharding.reference_model import MANIFEST
from ckptmap.storage.files import Files
from ckptmap.storage.safe_names import inside
from ckptmap.tensors import Box, Chunk, Path, Region, StoredTensor, TensorInfo

NAME = re.compile(
    r"shard-(?P<rank>\d{5,})-model-(?P<file>\d{5,})-of-(?P<count>\d{5,})\.safetensors"
)
SHARDING = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
CONSOLIDATED = "sharded"


class DcpHf:
    """Reads the shards of all ranks; each tensor is put together from its parts."""

    name = "dcp-hf"

    def claims(self, place: Place) -> bool:
        return place.is_dir and any(NAME.fullmatch(name) for name in place.names)

    def index(self, place: Place) -> Index:
        """Raises SourceError CKM110 where files of ranks are missing or of several saves, CKM112
        where parts overlap or leave holes, CKM107 for a header without offsets."""
        root = str(FilePath(place.path).absolute())
        names = [name for name in place.names if NAME.fullmatch(name)]
        ranks = _check_names(names, root)
        parts: dict[str, list[tuple[str, Chunk]]] = {}
        records: dict[str, Mapping[str, object]] = {}
        files = Files()
        try:
            with paused_gc():
                paths = [inside(root, name, root) for name in names]
                for file in paths:
                    refuse_text(files, file)
                    header = parse(files, file)
                    _read(header, file, parts)
                    records |= records_of(header, file)
                leaves: dict[Path, StoredTensor] = {
                    (k,): _joined(k, p, root) for k, p in parts.items()
                }
        finally:
            files.close()
        notes = _check_whole(parts, leaves, ranks, root)
        return Index(self.name, leaves, tuple(paths), records, world=ranks, notes=notes)


def _check_names(names: list[str], root: str) -> int:
    """How many ranks there are. Ranks are 1..R without a gap, files 1..N all there."""
    found = [match for match in map(NAME.fullmatch, names) if match]
    counts = {int(match["count"]) for match in found}
    if len(counts) > 1:
        raise SourceError(
            "CKM110",
            f"{root}: shards of several saves: of {' and of '.join(map(str, sorted(counts)))} files",
            "move each save into a directory of its own",
        )
    for kind, group, last in (("rank", "rank", 0), ("file", "file", counts.pop())):
        present = {int(match[group]) for match in found}
        missing = sorted(set(range(1, max(last, *present) + 1)) - present)
        if missing or min(present) < 1 or (last and max(present) > last):
            where = f"{kind} {missing[0]}" if missing else f"a {kind} in 1..{last}"
            raise SourceError(
                "CKM110",
                f"{root}: the shards of {where} are missing, found those of {len(present)} {kind}s"
                f" up to {max(present)}",
                "copy the shards of all ranks here",
            )
    return len({int(match["rank"]) for match in found})


def _check_whole(
    parts: Mapping[str, Sequence[tuple[str, Chunk]]], leaves: Mapping[Path, StoredTensor], ranks: int,
    root: str,
) -> tuple[str, ...]:  # fmt: skip
    """A note where nothing says that these are all ranks. Raises SourceError CKM110 where
    something says that they are not."""
    infos = {str(path[0]): leaf.info for path, leaf in leaves.items()}
    if _is_listed(root):
        return ()
    _check_consolidated(infos, root)
    found = {
        key: rows_of(infos[key], [Part(_rank(c.region.file), c) for _, c in chunks], ranks)
        for key, chunks in parts.items()
    }
    rows = {key: each for key, each in found.items() if each is not None}
    against = contradiction(infos, rows)
    if against is not None:
        key, wide = against
        raise _incomplete(
            f"{root}: {key} has {infos[key].shape[0]} elements, most matrices {wide} columns: the"
            f" shards of rank {ranks + 1} are missing, found those of {ranks} ranks"
        )
    if is_proven(rows.values(), ranks):
        return ()
    return (
        f"the shards do not say how many ranks wrote them: the files of {ranks} are here, and all"
        " tensors are cut so that a last rank could be missing",
    )


def _is_listed(root: str) -> bool:
    """Does our own manifest list the files? Then all must be there."""
    try:
        document = json.loads((FilePath(root) / MANIFEST).read_text(encoding="utf-8"))
        listed = [name for name in document["files"] if NAME.fullmatch(name)]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return False
    lost = next((name for name in listed if not (FilePath(root) / name).is_file()), None)
    if lost is not None:
        raise _incomplete(f"{root}: {lost} is missing, {MANIFEST} lists it")
    return bool(listed)


def _check_consolidated(infos: Mapping[str, TensorInfo], root: str) -> None:
    """torch keeps the shards in `sharded/` of the directory where it puts them together."""
    folder = FilePath(root)
    if folder.name != CONSOLIDATED:
        return
    files = Files()
    try:
        for file in sorted(folder.parent.glob("*.safetensors")):
            for key, (info, _, _) in parse(files, str(file)).tensors.items():
                if infos.get(key) != info:
                    raise _incomplete(
                        f"{root}: {key} is {infos.get(key, 'not here')}, in {file.name} around it"
                        f" {info}: shards are missing"
                    )
    finally:
        files.close()


def _rank(file: str) -> int:
    match = NAME.fullmatch(FilePath(file).name)
    assert match is not None, f"{file}: was claimed by its name"
    return int(match["rank"]) - 1


def _incomplete(what: str) -> SourceError:
    return SourceError("CKM110", what, "copy the shards of all ranks here")


def _read(header: Header, file: str, parts: dict[str, list[tuple[str, Chunk]]]) -> None:
    """Add the file's parts, by tensor, each with its dtype."""
    sharding = _sharding(header, file)
    for key, (info, begin, _) in header.tensors.items():
        offsets = _offsets(sharding.get(key), info, key, file)
        region = Region.contiguous(file, begin, info.shape, info.itemsize)
        parts.setdefault(key, []).append((info.dtype, Chunk(Box(offsets, info.shape), region)))


def _sharding(header: Header, file: str) -> Mapping[str, object]:
    try:
        found = json.loads(header.metadata.get(SHARDING, "null"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _bad(file, f"__metadata__[{SHARDING!r}], expected a JSON object")
    return found


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
    """One tensor of its parts; they tile what they reach."""
    first_dtype, first = parts[0]
    for dtype, chunk in parts[1:]:
        if dtype != first_dtype or len(chunk.box.sizes) != len(first.box.sizes):
            raise SourceError(
                "CKM113",
                f"{chunk.region.file}: {key!r} is {dtype}{list(chunk.box.sizes)}, in "
                f"{FilePath(first.region.file).name} {first_dtype}{list(first.box.sizes)}",
                "these shards are not of one save",
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
            f"{root}: tensor {key!r}: {wrong}, expected parts that fill {list(shape)}",
            "a rank's shards are missing or of another save; copy all of one save",
        )
    return StoredTensor(TensorInfo(shape, first_dtype), chunks)


def _bad(file: str, what: str) -> SourceError:
    return SourceError(
        "CKM107", f"{file}: bad DCP shard: {what}", "save again, or copy the file again"
    )
