"""Parse the header of a GGUF file: metadata as keys with typed values, then the tensors' names and places.

    "GGUF", u32 version, u64 tensors, u64 keys
    keys     text key, u32 type, value        a text is a u64 length and UTF-8; an array is type, u64, values
    tensors  text name, u32 dims, u64 extents (the fastest first), u32 type, u64 offset
    data     from the next multiple of general.alignment (32) on; offsets count from there

Source: ggml, docs/gguf.md. Versions 2 and 3 in little endian are read; they are equal in that. Arrays are not
kept, as those of a tokenizer have 200,000 texts: a short one of numbers is, and of others the count and the place.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from ckptmap.errors import SourceError
from ckptmap.formats.gguf.block_types import BY_NUMBER, REMOVED, BlockType
from ckptmap.formats.gguf.cursor import MAGIC, MAX_KEY_NBYTES, Cursor, Texts
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.storage.files import Files

VERSIONS = (2, 3)
MAX_DIMS = 4
KEPTNUMBERS = 4096
"""An array of at most so many numbers is kept: sizes of layers, for one."""
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of factors of the rotary frequencies, which transformers states in config.json."""
ROW = "ffn_gate_inp_shexp.weight"
"""End of the name of a vector that llama.cpp's converter writes as one row today, and wrote as a vector before."""
MAX_ALIGNMENT = 1 << 20
ALIGNMENT = "general.alignment"
NUMBERS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Type of a value -> its format in `struct`, of all but texts (8) and arrays (9)."""
_TEXT, _ARRAY = 8, 9
_LEAST_KEY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
"""Fewest bytes of a key with its value, and of a tensor's entry."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """An array of numbers, of which only their count is kept."""

    count: int


Value: TypeAlias = int | float | bool | str | tuple[int | float | bool, ...] | Texts | Numbers


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its name, shape (the slowest dim first) and type, and where its bytes begin in the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.type.numel * self.type.nbytes


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    data     where its tensors begin
    align    every tensor begins at a multiple of it, counted from `data`
    factors  values of the tensors in FACTORS, which belong to the config of other libraries
    """

    file: str
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]
    data: int
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    align: int = 32

    @property
    def end(self) -> int:
        """Return where the tensors end, with the padding of the last one."""
        last = max((each.offset + each.nbytes for each in self.tensors), default=self.data)
        return self.data + -(-(last - self.data) // self.align) * self.align

    def text(self, key: str) -> str:
        """Return a text of the metadata, "" where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def count(self, key: str) -> int | None:
        """Return a number of the metadata, None where there is none."""
        value = self.metadata.get(key)
        return value if type(value) is int else None


def parse(files: Files, file: str) -> GgufHeader:
    """Return the header of a file.

    Raise SourceError CKM101 if it cannot be read, CKM104 if it is truncated, CKM119 for a malformed header, a
    version or a type that is not known, or bytes in big endian.
    """
    cursor = Cursor(files, file, Fingerprint.of(file, files.mounts).nbytes)
    version = read_version(cursor)
    tensors, keys = cursor.u64(), cursor.u64()
    for count, least, what in ((keys, _LEAST_KEY, "keys"), (tensors, _LEAST_TENSOR, "tensors")):
        if count > cursor.left // least:
            cursor.what = f"{count} {what}"
            raise cursor.truncated(count * least)
    metadata = _metadata(cursor, keys)
    alignment = _alignment(cursor, metadata)
    entries = _entries(cursor, tensors)
    data = -(-cursor.offset // alignment) * alignment
    placed = _placed(cursor, entries, data, alignment)
    factors = {each.name: _floats(files, file, each) for each in placed if _is_factors(each)}
    return GgufHeader(file, version, metadata, placed, data, factors, alignment)


def _is_factors(tensor: GgufTensor) -> bool:
    plain = tensor.type.name == "F32" and len(tensor.shape) == 1
    return tensor.name in FACTORS and plain and tensor.shape[0] <= KEPTNUMBERS


def _floats(files: Files, file: str, tensor: GgufTensor) -> tuple[float, ...]:
    return struct.unpack(f"<{tensor.shape[0]}f", files.read(file, tensor.offset, tensor.nbytes))


def read_version(cursor: Cursor) -> int:
    """Return the version that a file states. Raise SourceError CKM119 where it is none that is read."""
    if cursor.take(4) != MAGIC:
        raise cursor.malformed("expected GGUF as its first bytes")
    version = cursor.u32()
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0 and version:
        raise SourceError(
            "CKM119",
            f"{cursor.file}: expected little endian, found a GGUF file in big endian",
            "turn it around first, with gguf_convert_endian of the gguf package",
        )
    known = " and ".join(map(str, VERSIONS))
    hint = "write it again with a current llama.cpp" if version < 2 else "upgrade ckptmap"
    raise SourceError(
        "CKM119", f"{cursor.file}: expected a GGUF version of {known}, found {version}", hint
    )


def _metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for number in range(count):
        cursor.what = f"key {number} of {count}"
        key = cursor.text(MAX_KEY_NBYTES)
        cursor.what = f"key {key[:80]!r}"
        if key in metadata:
            raise cursor.malformed("expected it once, found it twice")
        metadata[key] = read_value(cursor)
    return metadata


def read_value(cursor: Cursor) -> Value:
    """Return the next value of the metadata; of long arrays their count and place. Raise as `parse` does."""
    kind = cursor.u32()
    if kind == _TEXT:
        return cursor.text()
    if kind != _ARRAY:
        code = _code(cursor, kind)
        return _numbers(cursor, code, 1)[0]
    inner, count = cursor.u32(), cursor.u64()
    if inner == _TEXT:
        return cursor.texts(count)
    if inner == _ARRAY:
        raise cursor.malformed("expected an array of numbers or texts, found an array of arrays")
    code = _code(cursor, inner)
    if count > cursor.left // struct.calcsize(code):
        raise cursor.truncated(count * struct.calcsize(code))
    if count <= KEPTNUMBERS:
        return _numbers(cursor, code, count)
    cursor.skip(count * struct.calcsize(code))
    return Numbers(count)


def _code(cursor: Cursor, kind: int) -> str:
    if kind not in NUMBERS:
        raise cursor.malformed(f"expected a type of value from 0 to 12, found {kind}")
    return NUMBERS[kind]


def _numbers(cursor: Cursor, code: str, count: int) -> tuple[int | float | bool, ...]:
    return struct.unpack(f"<{count}{code}", cursor.take(count * struct.calcsize(code)))


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get(ALIGNMENT, 32)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        cursor.what = f"key {ALIGNMENT!r}"
        raise cursor.malformed(f"expected a power of two, found {value!r:.40}")
    return value


# -------------------------------------------------------------------------------- tensors


def _entries(cursor: Cursor, count: int) -> list[GgufTensor]:
    """Return the entries, with offsets that count from the start of the data."""
    entries: dict[str, GgufTensor] = {}
    for number in range(count):
        cursor.what = f"tensor {number} of {count}"
        name = cursor.text(MAX_KEY_NBYTES)
        cursor.what = f"tensor {name[:80]!r}"
        if name in entries:
            raise cursor.malformed("expected it once, found it twice")
        dims = cursor.u32()
        if dims > MAX_DIMS:
            raise cursor.malformed(f"expected at most {MAX_DIMS} dims, found {dims}")
        shape = struct.unpack(f"<{dims}Q", cursor.take(8 * dims))[::-1]
        if name.endswith(ROW) and dims == 2 and shape[0] == 1:
            shape = shape[1:]
        entries[name] = GgufTensor(name, shape, _type(cursor, shape), cursor.u64())
    return list(entries.values())


def _type(cursor: Cursor, shape: tuple[int, ...]) -> BlockType:
    number = cursor.u32()
    found = BY_NUMBER.get(number)
    if found is None:
        old = f", {REMOVED[number]}, which ggml has removed" if number in REMOVED else ""
        raise cursor.malformed(f"expected a type of ggml, found type {number}{old}")
    if (shape[-1] if shape else 1) % found.numel:
        raise cursor.malformed(
            f"expected rows of whole blocks of {found.numel} values ({found.name}), found shape {list(shape)}"
        )
    return found


def _placed(
    cursor: Cursor, entries: list[GgufTensor], data: int, alignment: int
) -> tuple[GgufTensor, ...]:
    """Return the entries with places in the file, proven to lie in it and not to overlap."""
    end, before = 0, ""
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        cursor.what = f"tensor {entry.name[:80]!r}"
        if entry.offset % alignment:
            raise cursor.malformed(f"expected a multiple of {alignment} as its offset, found {entry.offset}")  # fmt: skip
        if entry.offset < end:
            raise cursor.malformed(f"expected an offset of {end} or more, found {entry.offset}, inside of {before[:80]!r}")  # fmt: skip
        end, before = entry.offset + entry.nbytes, entry.name
        if data + end > cursor.nbytes:
            cursor.offset = min(data + entry.offset, cursor.nbytes)
            raise cursor.truncated(entry.nbytes)
    return tuple(GgufTensor(e.name, e.shape, e.type, data + e.offset) for e in entries)
