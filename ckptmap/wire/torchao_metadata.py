"""The metadata of torchao's safetensors files: which class each flattened tensor was.

    {"0.weight": '{"_type": "Int8Tensor", "_data": {...}, "_tensor_data_names": [...]}',
     "0.bias": '{"_type": "Tensor"}', "tensor_names": '["0.weight", "0.bias"]'}

Every shard repeats all of it (torchao/prototype/safetensors, 0.15 to 0.18). transformers looks
tensors up by what they are called once loaded, so that a renamed one is entered by that name, too,
marked as an alias; torchao passes over entries whose tensors are not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptmap.loaded_names import loaded_as

NAMES = "tensor_names"
SCHEME = "torchao"
ALIAS = "ckptmap_alias_of"


def part_key(key: str, part: str) -> str:
    """`fc.weight` and `qdata` -> `fc._weight_qdata`."""
    stem, dot, last = key.rpartition(".")
    return f"{stem}{dot}_{last}_{part}"


def parts_of(fqn: str, record: Mapping[str, Any]) -> list[str]:
    """Stored keys of a tensor, by a record that `read` made."""
    names = record.get("names")
    return [part_key(fqn, str(name)) for name in names] if isinstance(names, list) else [fqn]


def read(metadata: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """A record for each tensor that is no plain one; empty where torchao did not write it."""
    if NAMES not in metadata:
        return {}
    names = _json(metadata[NAMES])
    if not isinstance(names, list):
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for name in names:
        entry = _json(metadata.get(name, "")) if isinstance(name, str) else None
        if not isinstance(entry, dict) or ALIAS in entry:
            continue
        if entry.get("_type") not in (None, "Tensor"):
            found[name] = {
                "scheme": SCHEME,
                "kind": entry["_type"],
                "data": entry.get("_data"),
                "names": entry.get("_tensor_data_names"),
            }
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def write(records: Mapping[str, Mapping[str, Any]], keys: Iterable[str]) -> dict[str, str]:
    """Metadata of a checkpoint that stores `keys`; empty where no record is of torchao's form."""
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
    plain = (key for key in keys if key not in parts and "." in key)  # torchao splits every name
    found = {key: json.dumps({"_type": "Tensor"}) for key in plain}
    found |= {fqn: json.dumps(entry) for fqn, entry in entries.items()}
    others = loaded_as([*found])
    for fqn, entry in entries.items():
        module, _, last = fqn.rpartition(".")
        aliases = {f"{other}.{last}": {**entry, ALIAS: fqn} for other in others(module)}
        found |= {key: json.dumps(alias) for key, alias in aliases.items() if key not in found}
    return {**found, NAMES: json.dumps(list(found))}


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
