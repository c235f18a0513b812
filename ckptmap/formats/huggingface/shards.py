"""Read the shards of a Hugging Face directory as one: their tensors by name, and their encoding records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.errors import CkptmapError, SourceError
from ckptmap.formats.huggingface.missing_shards import require_all
from ckptmap.formats.huggingface.shard_index import ShardIndex, require_listed
from ckptmap.formats.safetensors import torchao_metadata
from ckptmap.formats.safetensors.file import records_of, refuse_text, stored_tensors
from ckptmap.formats.safetensors.header import Header, parse
from ckptmap.protocols import Mounts
from ckptmap.storage.files import Files
from ckptmap.storage.safe_names import blobs_of, inside

_NUMBERED = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors")
"""Matches a shard of a set; some releases write the numbers with six digits, or without zeros before them."""

Contents = tuple[PlainTensors, dict[str, Mapping[str, object]], tuple[str, ...], int]


def read_shards(
    root: str, shards: Sequence[str], where: str, mounts: Mounts,
    listed: ShardIndex | None = None,
) -> Contents:  # fmt: skip
    """Return leaves, records, files and bytes of all shards; leaves are in the order of the shards."""
    headers = _headers(root, shards, where, mounts, listed)
    if listed is None:
        if len(shards) > 1:
            _homes(headers.by_shard, where)
    elif listed.ordered(headers.keys()) is None:
        require_listed(_homes(headers.by_shard, where), listed.weight_map, where)
    return _contents(headers, shards)


def read_listed(
    root: str, listed: ShardIndex, beside: Sequence[str], where: str, mounts: Mounts
) -> tuple[Sequence[str], Contents]:
    """Return the shards that an index lists, and what `read_shards` does.

    beside  the names of the files in its directory

    Mostly an index lists the one whole set of numbered shards beside it. They are read first: that its text is the one
    which they give takes a third of the time of looking for files in each entry.
    """
    likely = _whole_set(beside)
    with suppress(CkptmapError):  # of files that the index may not list
        headers = _headers(root, likely, where, mounts, listed)
        shards = listed.ordered(headers.keys())
        if shards is not None:
            return shards, _contents(headers, shards)
    return listed.shards, read_shards(root, listed.shards, where, mounts, listed)


def _whole_set(names: Sequence[str]) -> Sequence[str]:
    """Return the numbered shards among these files if they are one set, and whole; else nothing."""
    matches = [match for match in map(_NUMBERED.fullmatch, names) if match]
    sets = {(match["stem"], int(match["count"])) for match in matches}
    whole = len(sets) == 1 and {count for _, count in sets} == {len(matches)}
    return sorted(match.string for match in matches) if whole else ()


class _Headers(NamedTuple):
    """The headers of shards, by the name of the shard.

    paths    of the files
    records  encoding records of all, by FQN
    """

    by_shard: dict[str, Header]
    paths: dict[str, str]
    records: dict[str, dict[str, Mapping[str, object]]]

    def keys(self) -> dict[str, Sequence[str]]:
        return {shard: header.keys for shard, header in self.by_shard.items()}


def _headers(
    root: str, shards: Sequence[str], where: str, mounts: Mounts, listed: ShardIndex | None
) -> _Headers:
    """Return the headers of these shards, which all have to be there."""
    also = blobs_of(root)
    paths = {shard: inside(root, shard, where, also) for shard in shards}
    require_all(root, shards, where, mounts, listed)
    by_shard: dict[str, Header] = {}
    records: dict[str, dict[str, Mapping[str, object]]] = {}
    files = Files(mounts=mounts)
    try:
        for shard, file in paths.items():
            refuse_text(files, file)
            by_shard[shard] = header = parse(files, file)
            records[shard] = records_of(header, file)
    finally:
        files.close()
    return _Headers(by_shard, paths, records)


def _contents(of_shards: _Headers, shards: Sequence[str]) -> Contents:
    """Return what these headers say, in the order of `shards`."""
    headers = [of_shards.by_shard[shard] for shard in shards]
    paths = [of_shards.paths[shard] for shard in shards]
    records: dict[str, Mapping[str, object]] = {}
    for shard, file in zip(shards, paths, strict=True):
        _merge_records(records, of_shards.records[shard], file)
    leaves = stored_tensors(headers, paths)
    if records:
        keys = [key for header in headers for key in header.keys]
        records = torchao_metadata.by_stored_name(records, keys)
    return leaves, records, tuple(paths), sum(header.nbytes for header in headers)


def _homes(headers: Mapping[str, Header], where: str) -> dict[str, str]:
    """Return the shard of each tensor of these headers. Raise SourceError CKM108 for one that two shards have."""
    homes: dict[str, str] = {}
    for shard, header in headers.items():
        both = homes.keys() & header.keys
        if both:
            key = min(both)
            raise SourceError(
                "CKM108",
                f"{where}: tensor {key!r} is stored in {homes[key]!r} and in {shard!r}, expected one of them",
                "move the shard that is of another save to another directory",
            )
        homes.update(dict.fromkeys(header.keys, shard))
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
