"""Write the metadata of a GGUF file: every value as its type (u32) and its bytes, little endian.

    uint32 8  ->  04 00 00 00  08 00 00 00
    text      ->  08 00 00 00  u64 bytes, UTF-8
    array     ->  09 00 00 00  type of its values, u64 count, the values

Values are kept in this form from where they are made to the file: those of another file are copied as they are.
Source: ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ckptmap.formats.gguf.cursor import MAGIC, MAX_KEY_NBYTES, Cursor
from ckptmap.formats.gguf.header import NUMBERS, read_value, read_version
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.storage.files import Files

KeyValues: TypeAlias = Mapping[str, bytes]
"""Key -> its type and value, as they are written."""
VERSION = 3
_U16, _U32, _I32, _F32, _BOOL, _TEXT, _ARRAY, _U64 = 2, 4, 5, 6, 7, 8, 9, 10


def u16(value: int) -> bytes:
    return struct.pack("<IH", _U16, value)


def i32(value: int) -> bytes:
    return struct.pack("<Ii", _I32, value)


def u32(value: int) -> bytes:
    return struct.pack("<II", _U32, value)


def f32(value: float) -> bytes:
    return struct.pack("<If", _F32, value)


def boolean(value: bool) -> bytes:
    return struct.pack("<I?", _BOOL, value)


def text(value: str) -> bytes:
    return struct.pack("<I", _TEXT) + sized(value)


def texts(values: Sequence[str]) -> bytes:
    return struct.pack("<IIQ", _ARRAY, _TEXT, len(values)) + b"".join(map(sized, values))


def i32s(values: Sequence[int]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}i", _ARRAY, _I32, len(values), *values)


def f32s(values: Sequence[float]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}f", _ARRAY, _F32, len(values), *values)


def sized(value: str) -> bytes:
    """Return a text with its length before it: u64, UTF-8; half a character becomes a question mark."""
    data = value.encode("utf-8", errors="replace")
    return struct.pack("<Q", len(data)) + data


def head(key_values: KeyValues, tensors: int) -> bytes:
    """Return the file up to the entries of its tensors, of which there are so many."""
    start = MAGIC + struct.pack("<IQQ", VERSION, tensors, len(key_values))
    return start + b"".join(sized(key) + value for key, value in key_values.items())


def split_head(data: bytes) -> dict[str, bytes]:
    """Return the metadata of what `head` made: keys with types and values."""
    count, at = struct.unpack_from("<Q", data, 16)[0], 24
    found: dict[str, bytes] = {}
    for _ in range(count):
        start = at + 8 + struct.unpack_from("<Q", data, at)[0]
        end = _end(data, start)
        found[data[at + 8 : start].decode()] = data[start:end]
        at = end
    return found


def _end(data: bytes, at: int) -> int:
    """Return where a value that begins at a byte ends, its type included."""
    (kind,) = struct.unpack_from("<I", data, at)
    if kind == _TEXT:
        return int(at + 12 + struct.unpack_from("<Q", data, at + 4)[0])
    if kind != _ARRAY:
        return at + 4 + struct.calcsize(NUMBERS[kind])
    inner, count = struct.unpack_from("<IQ", data, at + 4)
    at += 16
    if inner != _TEXT:
        return int(at + count * struct.calcsize(NUMBERS[inner]))
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    return at


def read_key_values(files: Files, file: str) -> dict[str, bytes]:
    """Return the metadata of a file as they lie in it. Raise as `header.parse` does."""
    cursor = Cursor(files, file, Fingerprint.of(file, files.mounts).nbytes)
    read_version(cursor)
    _, count = cursor.u64(), cursor.u64()
    found: dict[str, bytes] = {}
    for number in range(count):
        cursor.what = f"key {number} of {count}"
        key, start = cursor.text(MAX_KEY_NBYTES), cursor.offset
        read_value(cursor)
        found[key] = files.read(file, start, cursor.offset - start)
    return found


def stated_u32(value: bytes) -> int | None:
    """Return the number that a value states; None where it is no u32."""
    kind, number = struct.unpack("<II", value) if len(value) == 8 else (None, None)
    return number if kind == _U32 else None
