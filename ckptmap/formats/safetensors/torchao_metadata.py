"""Read and write the `__metadata__` by which torchao finds its quantized tensors in safetensors files.

torchao stores a quantized tensor as several plain ones (codes, scales), and in `__metadata__` the
class that they are put together to:

    {"0.weight": '{"_type": "Int8Tensor", "_data": {...}, "_tensor_data_names": [...]}',
     "0.bias": '{"_type": "Tensor"}', "tensor_names": '["0.weight", "0.bias"]'}

Every shard repeats all of it (torchao/prototype/safetensors, 0.15 to 0.18). transformers renames some
modules while it loads, and looks their tensors up under the new name. So each of these gets a second
entry under that name, marked as an alias. torchao skips entries whose tensors are missing.

torchao 0.14 stored `0.weight:qdata` and `0.bias:_data`, and no `_tensor_data_names`. Its keys are
turned into those of 0.15.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ckptmap.core.columns import each
from ckptmap.core.json_text import parse_json
from ckptmap.formats.huggingface.loaded_names import loaded_as

NAMES = "tensor_names"
SCHEME = "torchao"
ALIAS = "ckptmap_alias_of"
PLAIN = "_data"
"""The part name that torchao 0.14 gave to a plain tensor."""


def part_key(key: str, part: str) -> str:
    """Return the stored key of a part of a tensor: `fc.weight` and `qdata` -> `fc._weight_qdata`."""
    stem, dot, last = key.rpartition(".")
    return f"{stem}{dot}_{last}_{part}"


def parts_of(fqn: str, record: Mapping[str, object]) -> list[str]:
    """Return the stored keys of a tensor, from a record that `read` made."""
    names = record.get("names")
    return [part_key(fqn, str(name)) for name in names] if isinstance(names, list) else [fqn]


def keys_of(metadata: Mapping[str, str], keys: Sequence[str]) -> Sequence[str]:
    """Return the stored keys as torchao 0.15 names them. Only those that 0.14 wrote change."""
    names = set(_names(metadata))
    if not names or not any(":" in key for key in keys):
        return keys
    return [_key(key, *key.rpartition(":")[::2], names) for key in keys]


def _key(key: str, fqn: str, part: str, names: Collection[str]) -> str:
    if fqn not in names:
        return key
    return fqn if part == PLAIN else part_key(fqn, part)


def _names(metadata: Mapping[str, str]) -> list[str]:
    names = _json(metadata[NAMES]) if NAMES in metadata else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def described(metadata: Mapping[str, str]) -> list[str]:
    """Return the keys under which torchao describes tensors."""
    return [NAMES, *_names(metadata)] if NAMES in metadata else []


def _parts(keys: Sequence[str]) -> dict[str, list[str]]:
    """Return FQN -> names of parts, from the stored keys of torchao 0.14."""
    parts: dict[str, list[str]] = {}
    for fqn, colon, part in (key.rpartition(":") for key in keys):
        if colon:
            parts.setdefault(fqn, []).append(part)
    return parts


def read(metadata: Mapping[str, str], keys: Sequence[str]) -> dict[str, Mapping[str, object]]:
    """Return FQN -> record {scheme, kind, data, names} of each quantized tensor. Return an empty dict if
    torchao did not write the file. Aliases are left out."""
    names = _names(metadata)
    texts = [metadata.get(name, "") for name in names]
    record_of = {text: _record(text) for text in dict.fromkeys(texts)}
    of_names = zip(names, map(record_of.__getitem__, texts), strict=True)
    records = {name: record for name, record in of_names if record is not None}
    if all("names" in record for record in record_of.values() if record is not None):
        return records
    parts = _parts(keys)
    return {name: {"names": parts.get(name), **record} for name, record in records.items()}


@lru_cache(maxsize=256)
def _record(text: str) -> Mapping[str, object] | None:
    """Return what an entry says of a quantized tensor, without `names` where 0.14 wrote it; None: it is of
    another. Tensors and shards with the same text share one object."""
    entry = _json(text)
    if not isinstance(entry, dict) or ALIAS in entry or entry.get("_type") in (None, "Tensor"):
        return None
    record = {"scheme": SCHEME, "kind": entry["_type"], "data": entry.get("_data")}
    names = entry.get("_tensor_data_names", ...)
    return record if names is ... else {**record, "names": names}


def by_stored_name(
    records: Mapping[str, Mapping[str, object]], keys: Collection[str]
) -> dict[str, Mapping[str, object]]:
    """Return the records under the names that the tensors have on disk; `keys` are all stored keys.

    transformers stores a tensor by its name on disk, but writes its record under the name that it
    takes once loaded.
    """
    stored = set(keys)
    mine = {fqn: record for fqn, record in records.items() if record.get("scheme") == SCHEME}
    first_of = dict(zip(mine, each(mine.values(), _first_part), strict=True))
    first_keys = [part_key(fqn, part) for fqn, part in first_of.items()]
    there = list(map(stored.__contains__, first_keys))
    missing = [fqn for fqn, is_there in zip(mine, there, strict=True) if not is_there]
    lost = {fqn for fqn in missing if not any(key in stored for key in parts_of(fqn, mine[fqn]))}
    if not lost:
        return dict(records)
    others = loaded_as(keys)
    renamed = dict(records)
    for key in keys:
        stem, _, last = key.rpartition(".")
        if last.startswith("_") and last.endswith("_qdata"):
            name = last[1:].removesuffix("_qdata")
            for other in lost.intersection(f"{module}.{name}" for module in others(stem)):
                renamed[f"{stem}.{name}"] = renamed.pop(other)
                lost.discard(other)
    return renamed


def _first_part(record: Mapping[str, object]) -> str:
    """Return the name of the first part of a tensor, by which it is mostly found; "" where none is named."""
    names = record.get("names")
    return str(names[0]) if isinstance(names, list) and names else ""


def _json(text: str) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return None


def write(records: Mapping[str, Mapping[str, object]], keys: Iterable[str]) -> dict[str, str]:
    """Return torchao's `__metadata__` for a checkpoint that stores `keys`. It is empty if no record is of
    torchao's form."""
    entries = {
        fqn: _entry(record) for fqn, record in records.items() if record.get("native") == SCHEME
    }
    if not entries:
        return {}
    parts = {
        part_key(fqn, part)
        for fqn, entry in entries.items()
        for part in entry["_tensor_data_names"]
    }
    # A key without a dot gets no entry: torchao splits every name at its last dot, and would fail.
    plain = (key for key in keys if key not in parts and "." in key)
    metadata = {key: json.dumps({"_type": "Tensor"}) for key in plain}
    metadata |= {fqn: json.dumps(entry) for fqn, entry in entries.items()}
    others = loaded_as([*metadata])
    for fqn, entry in entries.items():
        module, _, last = fqn.rpartition(".")
        aliases = {f"{other}.{last}": {**entry, ALIAS: fqn} for other in others(module)}
        metadata |= {
            key: json.dumps(alias) for key, alias in aliases.items() if key not in metadata
        }
    return {**metadata, NAMES: json.dumps(list(metadata))}


def difference(
    record: Mapping[str, object], entry: Mapping[str, object]
) -> tuple[str, str, str] | None:
    """Return (field, ckptmap's value, torchao's value) where two records of one tensor differ.

    `record` is ckptmap's own, `entry` one that `read` made of torchao's metadata. None: they agree, or
    torchao's entry is not of that tensor alone.
    """
    if record.get("native") != SCHEME:
        return "scheme", str(record.get("scheme")), f"{entry.get('kind')} of torchao"
    try:
        stated = _entry(record)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # malformed: its own reader says so
    ours, theirs = stated["_data"], entry.get("data")
    if stated["_type"] != entry.get("kind"):
        return "_type", str(stated["_type"]), str(entry.get("kind"))
    names = entry.get("names")
    if not isinstance(names, list) or sorted(map(str, names)) != sorted(
        stated["_tensor_data_names"]
    ):
        return "_tensor_data_names", str(stated["_tensor_data_names"]), str(names)
    if not isinstance(theirs, Mapping) or not isinstance(ours, Mapping):
        return None
    for field in ours:
        if field in theirs and theirs[field] != ours[field]:
            return field, json.dumps(ours[field]), json.dumps(theirs[field])
    return None


def _entry(record: Mapping[str, Any]) -> dict[str, Any]:
    if "names" in record:  # as it was read
        names = record["names"]
        return {"_type": record["kind"], "_data": record["data"], "_tensor_data_names": names}
    optional = [name for name, _, _ in record.get("extra", [])]
    zero = ["zero_point"] if record.get("zero_dtype") else []
    data = {
        **record["attributes"],
        "block_size": record["block"],
        "dtype": {"_type": "torch.dtype", "_data": record["dtype"]},
    }
    return {
        "_type": record["kind"],
        "_data": data,
        "_tensor_data_names": [*zero, *optional, "qdata", "scale"],
    }
