"""Read the shards of a Hugging Face directory as one: their tensors by name, and their encoding records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.errors import SourceError
from ckptmap.formats.huggingface.missing_shards import require_all
from ckptmap.formats.huggingface.shard_index import ShardIndex, require_listed
from ckptmap.formats.safetensors import torchao_metadata
from ckptmap.formats.safetensors.file import records_of, refuse_text, stored_tensors
from ckptmap.formats.safetensors.header import Header, parse
from ckptmap.protocols import Mounts
from ckptmap.storage.files import Files
from ckptmap.storage.safe_names import blobs_of, inside

Contents = tuple[PlainTensors, dict[str, Mapping[str, object]], tuple[str, ...], int]


def read_shards(
    root: str, shards: Sequence[str], where: str, mounts: Mounts,
    listed: ShardIndex | None = None,
) -> Contents:  # fmt: skip
    """Return leaves, records, files and bytes of all shards; leaves are in the order of the shards."""
    also = blobs_of(root)
    paths = [inside(root, shard, where, also) for shard in shards]
    require_all(root, shards, where, mounts, listed)
    headers: list[Header] = []
    records: dict[str, Mapping[str, object]] = {}
    files = Files(mounts=mounts)
    try:
        for file in paths:
            refuse_text(files, file)
            header = parse(files, file)
            headers.append(header)
            _merge_records(records, records_of(header, file), file)
    finally:
        files.close()
    if listed is None or not listed.lists(shards, [header.keys for header in headers]):
        home = _homes(headers, shards, where)
        if listed is not None:
            require_listed(home, listed.weight_map, where)
    leaves = stored_tensors(headers, paths)
    if records:
        keys = [key for header in headers for key in header.keys]
        records = torchao_metadata.by_stored_name(records, keys)
    return leaves, records, tuple(paths), sum(header.nbytes for header in headers)


def _homes(headers: Sequence[Header], shards: Sequence[str], where: str) -> dict[str, str]:
    """Return the shard of each tensor of these headers. Raise SourceError CKM108 for one that two shards have."""
    homes: dict[str, str] = {}
    for number, (header, shard) in enumerate(zip(headers, shards, strict=True)):
        before = len(homes)
        homes.update(dict.fromkeys(header.keys, shard))
        if len(homes) < before + len(header.keys):
            raise _twice(where, headers[:number], header, shards)
    return homes


def _merge_records(
    into: dict[str, Mapping[str, object]], more: Mapping[str, Mapping[str, object]], file: str
) -> None:
    for fqn, record in more.items():
        known = into.setdefault(fqn, record)
        if known is record or known == record:
            continue
        theirs = [r.get("scheme") == torchao_metadata.SCHEME for r in (known, record)]
        # Every shard repeats torchao's records; the shard that holds the tensor has ckptmap's.
        if theirs == [True, False]:
            into[fqn] = record
        elif theirs != [False, True]:
            raise SourceError(
                "CKM115",
                f"{file}: the encoding record of {fqn!r} differs from another shard's",
                "these shards are of different conversions; convert the original checkpoint again",
            )


def _twice(
    where: str, headers: Sequence[Header], last: Header, shards: Sequence[str]
) -> SourceError:
    """Return the error for a tensor of the shard `last` that a shard before it has, too."""
    keys = set(last.keys)
    key, first = min(
        (key, shard)
        for header, shard in zip(headers, shards, strict=False)
        for key in header.keys
        if key in keys
    )
    return SourceError(
        "CKM108",
        f"{where}: tensor {key!r} is stored in {first!r} and in {shards[len(headers)]!r}, expected"
        " one of them",
        "move the shard that is of another save to another directory",
    )
