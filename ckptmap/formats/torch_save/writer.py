"""Lay out the zip archives that `torch.load` reads: first the offset of each storage, then all bytes
around the storages.

Offsets and padding are those that torch writes through miniz (caffe2/serialize/inline_container.cc,
`getPadding`). So they also suit a `torch.load` that computes the offsets instead of looking them up
(`torch.utils.serialization.config.load.calculate_storage_offsets`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckptmap.formats.zip.directory import U16, U32
from ckptmap.storage.crc32 import crc32

_LOCAL_NBYTES = 30
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR_WIDE = struct.Struct("<4sI2Q")
_FLAGS_DATA, _FLAGS_EMPTY = 0x0808, 0x0800
"""Zip flags: UTF-8 names; sizes follow the data in a descriptor (but not for an empty member)."""

_ID_NBYTES = 40


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of an archive in file order, as columns: name, bytes of data, offset of the local
    header, offset of the data."""

    names: list[bytes]
    sizes: list[int]
    headers: list[int]
    offsets: list[int]

    def add(self, names: Iterable[bytes], sizes: Iterable[int], align: int) -> None:
        """Append members. Each is a local header, name, zip64 field, padding field, data and data
        descriptor. The data starts at a multiple of `align`."""
        at = self.end if self.names else 0
        self.names.extend(names)
        self.sizes.extend(sizes)
        new = slice(len(self.headers), None)
        for name, nbytes in zip(self.names[new], self.sizes[new], strict=True):
            start = at + _LOCAL_NBYTES + len(name) + 4
            if nbytes >= U32 or at >= U32:
                start += _wide_nbytes(nbytes, at)
            offset = start + -start % align
            self.headers.append(at)
            self.offsets.append(offset)
            at = offset + nbytes + 16 if 0 < nbytes < U32 > at else _end(nbytes, at, offset)

    @property
    def end(self) -> int:
        """Return the offset after the data descriptor of the last member."""
        return _end(self.sizes[-1], self.headers[-1], self.offsets[-1])

    def copy(self) -> _Members:
        """Return columns that can grow without changing these."""
        return _Members(
            self.names.copy(), self.sizes.copy(), self.headers.copy(), self.offsets.copy()
        )

    def header(self, at: int) -> bytes:
        """Return the local header of member `at`, padding included."""
        return _header(self.names[at], self.sizes[at], self.headers[at], self.offsets[at])

    def descriptor(self, at: int, crc: int) -> bytes:
        """Return the data descriptor of member `at`; empty if it has no data."""
        return _descriptor(self.sizes[at], self.headers[at], crc)


def _end(nbytes: int, header: int, offset: int) -> int:
    """Return the offset after the data descriptor: signature, CRC, two sizes of 4 or 8 bytes."""
    if not nbytes:
        return offset
    return offset + nbytes + (24 if nbytes >= U32 or header >= U32 else 16)


@dataclass(frozen=True)
class ZipLayout:
    """A planned archive: the data of storage i begin at `offsets[i]`.

    `nbytes` is its size without extra records.
    """

    root: str
    nbytes: int
    offsets: Sequence[int]
    align: int
    _members: _Members
    _first: int
    _contents: Mapping[bytes, bytes]

    def nbytes_with(self, extra: Mapping[str, int]) -> int:
        """Return the bytes of the archive with records of these names and sizes added."""
        if not extra:
            return self.nbytes
        members = self._members.copy()
        members.add(map(self._full, extra), extra.values(), self.align)
        return _end_nbytes(members)

    def _full(self, name: str) -> bytes:
        return f"{self.root}/{name}".encode()

    def seal(self, crcs: Sequence[int], extra: Mapping[str, bytes]) -> list[tuple[int, bytes]]:
        """Return (offset, bytes) of everything but the data of storages, in file order.

        `crcs` are the storages' CRC-32 in order; `extra` records go to the end of the archive.
        """
        return list(_pieces(*self._filled(crcs, extra)))

    def ends(self, crcs: Sequence[int], extra: Mapping[str, bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of all but the storages' data and the bytes between two storages, which
        `between` returns. No storage of the archive may be `ready`."""
        members, sums, contents = self._filled(crcs, extra)
        for name, data in contents.items():
            at = members.names.index(name)
            # In three pieces, because a manifest may have 20 MB and joining them would copy it.
            yield members.headers[at], members.header(at)
            yield members.offsets[at], data
            yield members.offsets[at] + len(data), members.descriptor(at, sums[at])
        if crcs:
            first, last = self._first, self._first + len(crcs) - 1
            yield members.headers[first], members.header(first)
            behind = members.offsets[last] + members.sizes[last]
            yield behind, members.descriptor(last, crcs[-1])
        yield members.end, _directory(members, sums)

    def between(self, number: int, crc: int) -> bytes:
        """Return the bytes between the data of storage `number`, of this CRC-32, and the next storage."""
        at, m = self._first + number, self._members
        after = _header(m.names[at + 1], m.sizes[at + 1], m.headers[at + 1], m.offsets[at + 1])
        return _descriptor(m.sizes[at], m.headers[at], crc) + after

    def _filled(
        self, crcs: Sequence[int], extra: Mapping[str, bytes]
    ) -> tuple[_Members, list[int], dict[bytes, bytes]]:
        """Return all members, their CRC-32s, and the contents that are known."""
        if len(crcs) != len(self.offsets):
            raise ValueError(f"{len(crcs)} checksums for {len(self.offsets)} storages")
        members = self._members.copy()
        contents = dict(self._contents)
        contents[self._full(".data/serialization_id")] = self._serialization_id(crcs)
        members.add(map(self._full, extra), map(len, extra.values()), self.align)
        contents.update((self._full(name), data) for name, data in extra.items())
        known = {name: crc32(data) for name, data in contents.items()}
        sums = [known.get(name, 0) for name in members.names]
        sums[self._first : self._first + len(crcs)] = crcs
        return members, sums, contents

    def _serialization_id(self, crcs: Sequence[int]) -> bytes:
        """Return a content id of 40 digits, as torch writes one. It is no checksum: no reader verifies it."""
        names = crc32(b"\0".join(self._members.names))
        values = crc32(struct.pack(f"<{len(crcs)}I", *crcs), crc32(_all(self._contents)))
        return f"{names:020d}{values:020d}".encode()


_NOTHING: Mapping[str, bytes] = {}


def layout_zip(
    root: str,
    pickle: bytes,
    storages: Sequence[tuple[str, int]],
    *,
    align: int = 64,
    ready: Mapping[str, bytes] = _NOTHING,
) -> ZipLayout:
    """Return the layout of an archive of a pickle and storages (key, nbytes), in the folder `root`.

    Data starts at multiples of `align` bytes. `ready` holds the content of storages that is known
    already: `seal` returns it together with the bytes around it.
    """
    fixed = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": str(align).encode(),
        "byteorder": b"little",
    }
    folder, first, last = f"{root}/", len(fixed), ("version", ".data/serialization_id")
    names = [*fixed, *(f"data/{key}" for key, _ in storages), *last]
    sizes = [*map(len, fixed.values()), *(nbytes for _, nbytes in storages), 2, _ID_NBYTES]
    members = _Members([], [], [], [])
    members.add([(folder + name).encode() for name in names], sizes, align)
    offsets = members.offsets[first : first + len(storages)]
    fixed["version"] = b"3\n"
    fixed.update({f"data/{key}": data for key, data in ready.items()})
    contents = {f"{root}/{name}".encode(): data for name, data in fixed.items()}
    return ZipLayout(root, _end_nbytes(members), offsets, align, members, first, contents)


def _all(contents: Mapping[bytes, bytes]) -> bytes:
    return b"".join(contents.values())


def _wide_nbytes(nbytes: int, header: int) -> int:
    """Return the bytes of the zip64 extra field of a local header: both sizes, then the offset."""
    if nbytes < U32 and header < U32:
        return 0
    return 4 + (16 if nbytes >= U32 else 0) + (8 if header >= U32 else 0)


def _wide_field(nbytes: int, header: int) -> bytes:
    if nbytes < U32 and header < U32:
        return b""
    values = [nbytes] * 2 if nbytes >= U32 else []
    values += [header] if header >= U32 else []
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def _header(name: bytes, nbytes: int, header: int, offset: int) -> bytes:
    """Return a local header. Sizes and CRC-32 are in the data descriptor after the data. The padding
    is an extra field `FB`, as torch writes it."""
    wide_field = b"" if nbytes < U32 > header else _wide_field(nbytes, header)
    padding_nbytes = offset - header - _LOCAL_NBYTES - len(name) - len(wide_field)
    head, padding = _around(len(name), len(wide_field), padding_nbytes, nbytes == 0)
    return b"".join((head, name, wide_field, padding))


@lru_cache(maxsize=4096)
def _around(
    name_nbytes: int, wide_nbytes: int, padding_nbytes: int, empty: bool
) -> tuple[bytes, bytes]:
    """Return the bytes before the name and those after the zip64 field, which is `wide_nbytes` long."""
    flags = _FLAGS_EMPTY if empty else _FLAGS_DATA
    head = _LOCAL.pack(
        b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, name_nbytes, wide_nbytes + padding_nbytes
    )
    return head, b"FB" + (padding_nbytes - 4).to_bytes(2, "little") + b"Z" * (padding_nbytes - 4)


def _descriptor(nbytes: int, header: int, crc: int) -> bytes:
    if not nbytes:
        return b""
    form = _DESCRIPTOR if nbytes < U32 > header else _DESCRIPTOR_WIDE
    return form.pack(b"PK\7\x08", crc, nbytes, nbytes)


def _central(name: bytes, nbytes: int, header: int, crc: int) -> bytes:
    wide = b"" if nbytes < U32 > header else _wide_field(nbytes, header)
    flags = _FLAGS_DATA if nbytes else _FLAGS_EMPTY
    nbytes, header = min(nbytes, U32), min(header, U32)
    head = _CENTRAL.pack(
        b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, nbytes, nbytes,
        len(name), len(wide), 0, 0, 0, 0, header,
    )  # fmt: skip
    return head + name + wide


def _end_nbytes(members: _Members) -> int:
    names, wide = sum(map(len, members.names)), 0
    if members.end >= U32:
        wide = sum(map(_wide_nbytes, members.sizes, members.headers))
    return members.end + len(members.names) * _CENTRAL.size + names + wide + 56 + 20 + 22


def _end_records(count: int, nbytes: int, offset: int) -> bytes:
    """Return the zip64 end record and its locator, which torch always writes, and the end record."""
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, nbytes, offset)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, offset + nbytes, 1)
    narrow = (min(count, U16), min(count, U16), min(nbytes, U32), min(offset, U32))
    return wide + locator + struct.pack("<4s2H2H2IH", b"PK\5\6", 0, 0, *narrow, 0)


def _pieces(
    members: _Members, crcs: Sequence[int], contents: Mapping[bytes, bytes]
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of each run of bytes between storages: a descriptor and the next header
    are one run."""
    run: list[bytes] = []
    start = 0
    for at, (name, nbytes, crc) in enumerate(zip(members.names, members.sizes, crcs, strict=True)):
        run.append(members.header(at))
        data = contents.get(name)
        if data is not None:
            run.append(data)
        elif nbytes:
            yield start, b"".join(run)
            run = []
            start = members.offsets[at] + nbytes
        run.append(members.descriptor(at, crc))
    yield start, b"".join((*run, _directory(members, crcs)))


def _directory(members: _Members, crcs: Sequence[int]) -> bytes:
    """Return the central directory and the end records of the archive."""
    entries = b"".join(map(_central, members.names, members.sizes, members.headers, crcs))
    return entries + _end_records(len(members.names), len(entries), members.end)
