"""Directories of zip archives that are alike: the same members in the same order, as the files of
a job's ranks have them. One is parsed; others are compared with it, all members at once.

    rank_0/data/0   crc   header at 512          one struct for a whole directory: what may differ
    rank_7/data/0   crc   header at 576          are the root, CRC-32, sizes and offsets

A directory that differs otherwise is parsed by itself, and so is one that needs zip64.
"""

from __future__ import annotations

import struct
from operator import add, le
from typing import Any

from ckptmap.files import Files
from ckptmap.wire.zip_read import LOCAL, U32, Entry, Records, parsed_records, read_directory

_FIXED = 46
"""Bytes of a directory entry before its name."""
_FIELDS = 9
"""Of a member: versions, flags, method and time; CRC-32; packed size; size; length of the name; the
other lengths and attributes; header offset; root; the rest of the name, extra field and comment."""


class AlikeDirectories:
    """Reads the directories of archives, one after the other, each compared with the first."""

    def __init__(self) -> None:
        self._first: _Pattern | None = None

    def read(self, files: Files, file: str, base: int, nbytes: int | None) -> Records:
        """Raises SourceError as `read_records` does."""
        window, raw, count, directory = read_directory(files, file, base, nbytes)
        if self._first is not None:
            alike = self._first.entries(raw, count, directory)
            if alike is not None:
                return Records(window, *alike)
        records = parsed_records(window, raw, count, directory)
        if self._first is None:
            self._first = _Pattern(records, raw)
        return records


class _Pattern:
    """What directories that are alike to one have in common."""

    def __init__(self, records: Records, raw: bytes) -> None:
        root = len(records.root.encode())
        self._structs: dict[int, struct.Struct] = {}
        self._names = list(records)
        self._rests = _rests(raw, root)
        fields = self._unpacked(raw, root) or ()
        self._common = _common(fields, root)
        named = [f"/{name}".encode() for name in self._names]
        rests = fields[8::_FIELDS]
        self._is_plain = (
            len(rests) == len(named)  # no folders
            and all(map(bytes.startswith, rests, named))  # they lie in the order they are listed in
        )

    def entries(
        self, raw: bytes, count: int, directory: int
    ) -> tuple[str, dict[str, Entry]] | None:
        """Root and entries of a directory that is alike, None of another."""
        root = raw[_FIXED : raw.find(b"/", _FIXED)]
        plain = root.isascii() and not (b".." in root or b"\\" in root or b"\0" in root)
        fields = self._unpacked(raw, len(root)) if plain and root else None
        if fields is None or not self._is_plain or count != len(self._names):
            return None
        if _common(fields, len(root)) != self._common or {*fields[7::_FIELDS]} != {root}:
            return None
        headers, sizes = fields[6::_FIELDS], fields[3::_FIELDS]
        limits = (*headers[1:], directory)
        fixed = [LOCAL.size + length for length in fields[4::_FIELDS]]
        ends = map(add, map(add, headers, fixed), sizes)
        if sizes != fields[2::_FIELDS] or max(*headers, *sizes) >= U32:
            return None
        if not all(map(le, ends, limits)):
            return None
        made = map(Entry, headers, sizes, fields[1::_FIELDS], limits)
        return root.decode(), dict(zip(self._names, made, strict=True))

    def _unpacked(self, raw: bytes, root: int) -> tuple[Any, ...] | None:
        known = self._structs.get(root)
        if known is None:
            each = "".join([f"16s3IH12sI{root}s{rest}s" for rest in self._rests])
            known = self._structs[root] = struct.Struct("<" + each)
        return known.unpack(raw) if known.size == len(raw) else None


def _rests(raw: bytes, root: int) -> list[int]:
    """Bytes of each entry after the root in its name, up to the next."""
    at, found = 0, []
    while at < len(raw):
        variable = sum(struct.unpack_from("<3H", raw, at + 28))
        found.append(variable - root)
        at += _FIXED + variable
    return found


def _common(fields: tuple[Any, ...], root: int) -> tuple[Any, ...]:
    """What must be equal: all but CRC-32, sizes, header offsets and the root."""
    lengths = [length - root for length in fields[4::_FIELDS]]
    return (*(fields[n::_FIELDS] for n in (0, 5, 8)), lengths)
