"""Read the JSON record of a tensor of 8-bit codes, which `ScaledEncoding.record` writes.

{"scheme", "version": 1, "block", "scale_dtype", "shape", "dtype", ...more of each format}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ckptmap.protocols.encodings import Record
from ckptmap.quantization.blockwise.group_checks import DAMAGED, malformed, read_sizes
from ckptmap.quantization.extra_parts import Extra
from ckptmap.tensors import ITEMSIZE, TensorInfo

VERSION = 1


@dataclass(frozen=True)
class ScaledRecord:
    """The fields that every record of this kind has; `more` is the whole record."""

    fqn: str
    info: TensorInfo
    block: tuple[int, ...]
    scale_dtype: str
    more: Mapping[str, object]

    def dtype(self, key: str) -> str:
        """Return a dtype by its key, "" where it is absent."""
        value = self.more.get(key, "")
        if value != "" and not (isinstance(value, str) and value in ITEMSIZE):
            raise malformed(self.fqn, f"{key} {str(value)[:40]!r} is not a dtype", DAMAGED)
        return str(value)

    def text(self, key: str) -> str:
        """Return a text by its key, "" where it is absent."""
        value = self.more.get(key, "")
        if not isinstance(value, str):
            raise malformed(self.fqn, f"{key}, expected text, found {str(value)[:40]!r}", DAMAGED)
        return value

    def attributes(self) -> str:
        """Return the attributes of the library's class as JSON text."""
        value = self.more.get("attributes", {})
        if not isinstance(value, dict):
            raise malformed(self.fqn, f"malformed attributes {str(value)[:40]!r}", DAMAGED)
        return json.dumps(value)

    def count(self, key: str, default: int) -> int:
        """Return a number by its key."""
        value = self.more.get(key, default)
        if type(value) is not int:
            raise malformed(
                self.fqn, f"{key}, expected a number, found {str(value)[:40]!r}", DAMAGED
            )
        return value

    def sizes(self, key: str) -> tuple[int, ...]:
        """Return the shape of a single scale by its key: a few ones."""
        value = self.more.get(key)
        if not isinstance(value, list) or len(value) > 8 or any(size != 1 for size in value):
            raise malformed(self.fqn, f"{key}, expected ones, found {str(value)[:40]!r}", DAMAGED)
        return (1,) * len(value)

    def extra(self) -> Extra:
        """Return the parts besides codes and scales, stored as [[name, dtype, shape], ...]."""
        value = self.more.get("extra", [])
        if not isinstance(value, list) or not all(
            isinstance(item, list) and len(item) == 3 and isinstance(item[0], str)
            and isinstance(item[1], str) and item[1] in ITEMSIZE and isinstance(item[2], list)
            and all(type(n) is int and n >= 0 for n in item[2])
            for item in value
        ):  # fmt: skip
            raise malformed(self.fqn, f"malformed parts {str(value)[:80]}", DAMAGED)
        return tuple((name, dtype, tuple(shape)) for name, dtype, shape in value)


def read_record(fqn: str, record: Record, name: str) -> ScaledRecord:
    """Parse a record of the format `name`. Raises SourceError CKM115 for another version or a bad one."""
    if record.get("version") != VERSION:
        raise malformed(
            fqn,
            f"{name} record of version {str(record.get('version'))[:20]!r}, expected {VERSION}",
            "upgrade ckptmap, or convert again with this version",
        )
    shape = read_sizes(fqn, record.get("shape"), f"{name} record: shape")
    block = read_sizes(fqn, record.get("block"), f"{name} record: block")
    header = ScaledRecord(fqn, TensorInfo(shape, str(record.get("dtype"))), block, "", record)
    header.dtype("dtype")
    if len(block) != len(shape) or not record.get("dtype"):
        raise malformed(fqn, f"malformed {name} record {str(dict(record))[:120]}", DAMAGED)
    return ScaledRecord(fqn, header.info, block, header.dtype("scale_dtype"), record)
