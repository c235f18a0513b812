"""Records of codes with one scale a block, as JSON: written by `Scaled.record`, read here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ckptmap.quantization.blockwise.group_checks import DAMAGED, malformed, read_sizes
from ckptmap.tensors import ITEMSIZE, TensorInfo

VERSION = 1


@dataclass(frozen=True)
class ScaledRecord:
    """What every record of this kind says; `more` is all of it."""

    fqn: str
    info: TensorInfo
    block: tuple[int, ...]
    scale_dtype: str
    more: Mapping[str, object]

    def dtype(self, key: str) -> str:
        """A dtype by its key, or ""."""
        value = self.more.get(key, "")
        if value != "" and not (isinstance(value, str) and value in ITEMSIZE):
            raise malformed(self.fqn, f"{key} {str(value)[:40]!r} is no dtype", DAMAGED)
        return str(value)

    def text(self, key: str) -> str:
        value = self.more.get(key, "")
        if not isinstance(value, str):
            raise malformed(self.fqn, f"{key}, expected text, found {str(value)[:40]!r}", DAMAGED)
        return value

    def attributes(self) -> str:
        """A JSON object, as text."""
        value = self.more.get("attributes", {})
        if not isinstance(value, dict):
            raise malformed(self.fqn, f"malformed attributes {str(value)[:40]!r}", DAMAGED)
        return json.dumps(value)

    def count(self, key: str, default: int) -> int:
        value = self.more.get(key, default)
        if type(value) is not int:
            raise malformed(
                self.fqn, f"{key}, expected a number, found {str(value)[:40]!r}", DAMAGED
            )
        return value

    def extra(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Parts beside codes and scales: [[name, dtype, shape], ...]."""
        value = self.more.get("extra", [])
        if not isinstance(value, list) or not all(
            isinstance(item, list) and len(item) == 3 and isinstance(item[0], str)
            and isinstance(item[1], str) and item[1] in ITEMSIZE and isinstance(item[2], list)
            and all(type(n) is int and n >= 0 for n in item[2])
            for item in value
        ):  # fmt: skip
            raise malformed(self.fqn, f"malformed parts {str(value)[:80]}", DAMAGED)
        return tuple((name, dtype, tuple(shape)) for name, dtype, shape in value)


def read_record(fqn: str, record: Mapping[str, object], name: str) -> ScaledRecord:
    """Raises SourceError CKM115 where it is of another version or malformed."""
    if record.get("version") != VERSION:
        raise malformed(
            fqn,
            f"{name} record of version {str(record.get('version'))[:20]!r}, expected {VERSION}",
            "upgrade ckptmap, or convert again with this version",
        )
    shape = read_sizes(fqn, record.get("shape"), f"{name} record: shape")
    block = read_sizes(fqn, record.get("block"), f"{name} record: block")
    found = ScaledRecord(fqn, TensorInfo(shape, str(record.get("dtype"))), block, "", record)
    found.dtype("dtype")
    if len(block) != len(shape) or not record.get("dtype"):
        raise malformed(fqn, f"malformed {name} record {str(dict(record))[:120]}", DAMAGED)
    return ScaledRecord(fqn, found.info, block, found.dtype("scale_dtype"), record)
