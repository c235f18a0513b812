"""Directories of zip archives that are alike: the same members in the same order, as the files of
a job's ranks have them. One is parsed; others are compared with it, all members at once.

    rank_0/data/0   crc   header at 512          one struct for a whole directory: what may differ
    rank_7/data/0   crc   header at 576          are the root, CRC-32, sizes and offsets

So are the local headers: where directories agree in all but CRC-32s and the name of the root, and
one archive's headers were understood, others' need only be the same bytes with another root.
A directory that differs otherwise is parsed by itself, and so is one that needs zip64.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from operator import add, le
from typing import Any, NamedTuple

from ckptmap.formats.zip.directory import LOCAL, U32, Entries
from ckptmap.formats.zip.reader import Records, Window, parsed_records, read_directory
from ckptmap.storage.files import Files

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
            alike = self._first.records(window, raw, count, directory)
            if alike is not None:
                return alike
        records = parsed_records(window, raw, count, directory)
        if self._first is None:
            self._first = _Pattern(records, raw)
        return records


class _Headers(NamedTuple):
    """Local headers of one archive, as others of its shape must have them."""

    places: Sequence[tuple[int, int]]
    """(nbytes, offset) of each, its name included."""
    pieces: Sequence[bytes]
    """What is between the names of the root."""
    starts: Mapping[str, int]
    """What they say: where the members begin."""


class _Shape:
    """What archives share that agree in all but CRC-32s and the root's name; nothing overlaps."""

    def __init__(
        self, numbers: Mapping[str, int], headers: Sequence[int], sizes: Sequence[int], end: int
    ) -> None:
        self.numbers, self.headers, self.sizes = numbers, headers, sizes
        self.limits = (*headers[1:], end)
        self.by_prefix: dict[str, dict[str, int]] = {}
        self.found: dict[str, _Headers] = {}


class _AlikeRecords(Records):
    """An archive of a known shape: what is known of another one is not worked out anew."""

    def __init__(self, window: Window, root: str, shape: _Shape, crcs: Sequence[int]) -> None:
        entries = Entries(shape.numbers, shape.headers, shape.sizes, crcs, shape.limits)
        super().__init__(window, root, entries)
        self._shape = shape

    def sizes(self, prefix: str) -> dict[str, int]:
        known = self._shape.by_prefix.get(prefix)
        if known is None:
            known = self._shape.by_prefix[prefix] = super().sizes(prefix)
        return known

    def starts(self, prefix: str) -> Mapping[str, int]:
        known = self._shape.found.get(prefix)
        if known is not None and self._reads(known.places) == self._root.join(known.pieces):
            self._window.files.forget(self.file)  # nothing more is wanted of it here
            return known.starts
        starts = super().starts(prefix)
        if known is None:
            self._shape.found[prefix] = self._headers(prefix, starts)
        return starts

    def _headers(self, prefix: str, starts: Mapping[str, int]) -> _Headers:
        named = [(n.encode(), e.header) for n, e in self._entries.items() if n.startswith(prefix)]
        fixed, root = LOCAL.size, len(self._root)
        places = [(fixed + root + len(name), self.base + header) for name, header in named]
        raw, at, pieces = self._reads(places), 0, [b""]
        for nbytes, _ in places:
            pieces[-1] += raw[at : at + fixed]
            pieces.append(raw[at + fixed + root : at + nbytes])
            at += nbytes
        return _Headers(places, pieces, starts)

    def _reads(self, places: Sequence[tuple[int, int]]) -> bytes:
        """Bytes at these places, one small read each; none where they cannot be read."""
        try:
            with self._window.files.descriptor(self.file) as fd:
                return b"".join([os.pread(fd, nbytes, at) for nbytes, at in places])
        except OSError:
            return b""


class _Pattern:
    """What directories that are alike to one have in common."""

    def __init__(self, records: Records, raw: bytes) -> None:
        root = len(records.root.encode())
        self._structs: dict[int, struct.Struct] = {}
        self._numbers = {name: number for number, name in enumerate(records)}
        self._rests = _rests(raw, root)
        fields = self._unpacked(raw, root) or ()
        self._common = _common(fields)
        self._lengths = [length - root for length in fields[4::_FIELDS]]
        self._shapes: dict[tuple[Any, ...], _Shape | None] = {}
        named = [f"/{name}".encode() for name in records]
        rests = fields[8::_FIELDS]
        self._is_plain = (
            len(rests) == len(named)  # no folders
            and all(map(bytes.startswith, rests, named))  # they lie in the order they are listed in
        )

    def records(self, window: Window, raw: bytes, count: int, directory: int) -> Records | None:
        """Those of a directory that is alike, None of another."""
        root = raw[_FIXED : raw.find(b"/", _FIXED)]
        plain = root.isascii() and not (b".." in root or b"\\" in root or b"\0" in root)
        fields = self._unpacked(raw, len(root)) if plain and root else None
        if fields is None or not self._is_plain or count != len(self._numbers):
            return None
        if _common(fields) != self._common or {*fields[7::_FIELDS]} != {root}:
            return None
        columns = fields[2::_FIELDS], fields[3::_FIELDS], fields[4::_FIELDS], fields[6::_FIELDS]
        key = (window.base, directory, *columns)
        if key not in self._shapes:
            self._shapes[key] = self._shape(len(root), directory, *columns)
        shape = self._shapes[key]
        if shape is None:
            return None
        return _AlikeRecords(window, root.decode(), shape, array("I", fields[1::_FIELDS]))

    def _shape(
        self,
        root: int,
        directory: int,
        packed: Sequence[int],
        sizes: Sequence[int],
        lengths: Sequence[int],
        headers: Sequence[int],
    ) -> _Shape | None:
        """None where a member reaches into the next, is compressed, or needs zip64."""
        ends = map(add, map(add, headers, [LOCAL.size + length for length in lengths]), sizes)
        if sizes != packed or max(*headers, *sizes) >= U32:
            return None
        if [length - root for length in lengths] != self._lengths:
            return None
        shape = _Shape(self._numbers, headers, sizes, directory)
        return shape if all(map(le, ends, shape.limits)) else None

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


def _common(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """What must be equal: all but CRC-32, sizes, the names' lengths, header offsets and the root."""
    return tuple([fields[n::_FIELDS] for n in (0, 5, 8)])
