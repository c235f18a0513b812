"""Lay out and seal torch.save zip files: where each storage goes, then every byte around them.

The layout is miniz's as torch drives it (caffe2/serialize/inline_container.cc `getPadding`), byte
for byte, so that readers that compute offsets instead of looking them up
(`torch.utils.serialization.config.load.calculate_storage_offsets`) find the data too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ckptmap.wire.zip_read import U16, U32

_LOCAL_NBYTES = 30
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR_WIDE = struct.Struct("<4sI2Q")
_FLAGS_DATA, _FLAGS_EMPTY = 0x0808, 0x0800
"""UTF-8 names; sizes follow the data in a descriptor (not where there is no data)."""

_ID_NBYTES = 40


class _Member(NamedTuple):
    name: bytes
    nbytes: int
    header: int
    offset: int
    """Where its header and its data start."""


def _end(member: _Member) -> int:
    """Past its data descriptor: signature, CRC, two sizes of 4 or 8 bytes."""
    _, nbytes, header, offset = member
    if not nbytes:
        return offset
    return offset + nbytes + (24 if nbytes >= U32 or header >= U32 else 16)


@dataclass(frozen=True)
class ZipLayout:
    """A planned archive: `offsets[i]` is where the data of storage i go.

    `nbytes` is its size without extra records.
    """

    root: str
    nbytes: int
    offsets: Sequence[int]
    align: int
    _members: Sequence[_Member]
    _first: int
    _contents: Mapping[bytes, bytes]

    def nbytes_with(self, extra: Mapping[str, int]) -> int:
        """Size of the archive that also holds records of these names and sizes."""
        if not extra:
            return self.nbytes
        members = list(self._members)
        for name, nbytes in extra.items():
            members.append(_place(_end(members[-1]), self._full(name), nbytes, self.align))
        return _end_nbytes(members)

    def _full(self, name: str) -> bytes:
        return f"{self.root}/{name}".encode()

    def seal(self, crcs: Sequence[int], extra: Mapping[str, bytes]) -> list[tuple[int, bytes]]:
        """(offset, bytes) of everything but the storages' data, in file order.

        `crcs` are the storages' CRC-32 in order; `extra` records go to the end of the archive.
        """
        return list(_pieces(*self._filled(crcs, extra)))

    def ends(self, crcs: Sequence[int], extra: Mapping[str, bytes]) -> Iterator[tuple[int, bytes]]:
        """The same without what lies between two storages, for which `between` is asked; for an
        archive of which no storage is `ready`."""
        members, sums, contents = self._filled(crcs, extra)
        for member, crc in zip(members, sums, strict=True):
            data = contents.get(member.name)
            if data is not None:  # piece by piece: a manifest may be 20 MB, and no copy is wanted
                yield member.header, _header(member)
                yield member.offset, data
                yield member.offset + member.nbytes, _descriptor(member, crc)
        if crcs:
            first, last = members[self._first], members[self._first + len(crcs) - 1]
            yield first.header, _header(first)
            yield last.offset + last.nbytes, _descriptor(last, crcs[-1])
        yield _end(members[-1]), _directory(members, sums)

    def between(self, number: int, crc: int) -> bytes:
        """What lies between the data of storage `number`, of this CRC-32, and of the next."""
        at = self._first + number
        return _descriptor(self._members[at], crc) + _header(self._members[at + 1])

    def _filled(
        self, crcs: Sequence[int], extra: Mapping[str, bytes]
    ) -> tuple[list[_Member], list[int], dict[bytes, bytes]]:
        """All members with their CRC-32 and what is known of their contents."""
        if len(crcs) != len(self.offsets):
            raise ValueError(f"{len(crcs)} checksums for {len(self.offsets)} storages")
        members = list(self._members)
        contents = dict(self._contents)
        contents[self._full(".data/serialization_id")] = self._serialization_id(crcs)
        for name, data in extra.items():
            members.append(_place(_end(members[-1]), self._full(name), len(data), self.align))
            contents[members[-1].name] = data
        sums = [zlib.crc32(contents[m.name]) if m.name in contents else 0 for m in members]
        sums[self._first : self._first + len(crcs)] = crcs
        return members, sums, contents

    def _serialization_id(self, crcs: Sequence[int]) -> bytes:
        """40 digits that change with names and contents, as torch's do; they protect nothing."""
        names = zlib.crc32(b"\0".join(member.name for member in self._members))
        values = zlib.crc32(struct.pack(f"<{len(crcs)}I", *crcs), zlib.crc32(_all(self._contents)))
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
    """Place a pickle and storages (key, nbytes) in an archive whose one folder is `root`.

    Data starts are multiples of `align`. The content of storages in `ready` is known: `seal`
    yields it with what is around it.
    """
    fixed = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": str(align).encode(),
        "byteorder": b"little",
    }
    sizes = [(name, len(data)) for name, data in fixed.items()]
    sizes += [(f"data/{key}", nbytes) for key, nbytes in storages]
    sizes += [("version", 2), (".data/serialization_id", _ID_NBYTES)]
    members, at, folder = [], 0, f"{root}/".encode()
    for name, nbytes in sizes:
        member = _place(at, folder + name.encode(), nbytes, align)
        members.append(member)
        at = _end(member)
    first = len(fixed)
    offsets = [member.offset for member in members[first : first + len(storages)]]
    fixed["version"] = b"3\n"
    fixed.update({f"data/{key}": data for key, data in ready.items()})
    contents = {f"{root}/{name}".encode(): data for name, data in fixed.items()}
    return ZipLayout(root, _end_nbytes(members), offsets, align, members, first, contents)


def _all(contents: Mapping[bytes, bytes]) -> bytes:
    return b"".join(contents.values())


def _place(at: int, name: bytes, nbytes: int, align: int) -> _Member:
    """A member whose header starts at `at`: header, name, zip64 and padding fields, data."""
    start = at + _LOCAL_NBYTES + len(name) + 4
    if nbytes >= U32 or at >= U32:
        start += _wide_nbytes(nbytes, at)
    return _Member(name, nbytes, at, start + -start % align)


def _wide_nbytes(nbytes: int, header: int) -> int:
    """Size of the zip64 extra field of a local header: both sizes, then the header's offset."""
    if nbytes < U32 and header < U32:
        return 0
    return 4 + (16 if nbytes >= U32 else 0) + (8 if header >= U32 else 0)


def _wide_field(nbytes: int, header: int) -> bytes:
    if nbytes < U32 and header < U32:
        return b""
    values = [nbytes] * 2 if nbytes >= U32 else []
    values += [header] if header >= U32 else []
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def _header(member: _Member) -> bytes:
    """A local header; sizes and CRC follow the data, padding is torch's `FB` field."""
    name, nbytes, header, offset = member
    wide = _wide_field(nbytes, header)
    rest = offset - header - _LOCAL_NBYTES - len(name) - len(wide)
    head, padding = _around(len(name), len(wide), rest, nbytes == 0)
    return b"".join((head, name, wide, padding))


@lru_cache(maxsize=4096)
def _around(name: int, wide: int, rest: int, empty: bool) -> tuple[bytes, bytes]:
    """What is before the name and behind the zip64 field, by the bytes of both and of the rest."""
    flags = _FLAGS_EMPTY if empty else _FLAGS_DATA
    head = _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, name, wide + rest)
    return head, b"FB" + (rest - 4).to_bytes(2, "little") + b"Z" * (rest - 4)


def _descriptor(member: _Member, crc: int) -> bytes:
    _, nbytes, header, _ = member
    if not nbytes:
        return b""
    form = _DESCRIPTOR if nbytes < U32 and header < U32 else _DESCRIPTOR_WIDE
    return form.pack(b"PK\7\x08", crc, nbytes, nbytes)


def _central(member: _Member, crc: int) -> bytes:
    name, nbytes, header, _ = member
    wide = _wide_field(nbytes, header)
    flags = _FLAGS_DATA if nbytes else _FLAGS_EMPTY
    nbytes, header = min(nbytes, U32), min(header, U32)
    head = _CENTRAL.pack(
        b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, nbytes, nbytes,
        len(name), len(wide), 0, 0, 0, 0, header,
    )  # fmt: skip
    return head + name + wide


def _end_nbytes(members: Sequence[_Member]) -> int:
    names = sum([len(name) for name, _, _, _ in members])
    wide = sum([len(_wide_field(n, at)) for _, n, at, _ in members if n >= U32 or at >= U32])
    return _end(members[-1]) + len(members) * _CENTRAL.size + names + wide + 56 + 20 + 22


def _end_records(count: int, nbytes: int, offset: int) -> bytes:
    """zip64 end record and locator, as torch always writes them, then the plain end record."""
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, nbytes, offset)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, offset + nbytes, 1)
    narrow = (min(count, U16), min(count, U16), min(nbytes, U32), min(offset, U32))
    return wide + locator + struct.pack("<4s2H2H2IH", b"PK\5\6", 0, 0, *narrow, 0)


def _pieces(
    members: Sequence[_Member], crcs: Sequence[int], contents: Mapping[bytes, bytes]
) -> Iterator[tuple[int, bytes]]:
    """Runs of bytes between the storages: a descriptor and the header after it are one run."""
    run: list[bytes] = []
    start = 0
    for member, crc in zip(members, crcs, strict=True):
        run.append(_header(member))
        data = contents.get(member.name)
        if data is not None:
            run.append(data)
        elif member.nbytes:
            yield start, b"".join(run)
            run = []
            start = member.offset + member.nbytes
        run.append(_descriptor(member, crc))
    yield start, b"".join((*run, _directory(members, crcs)))


def _directory(members: Sequence[_Member], crcs: Sequence[int]) -> bytes:
    """The central directory and the records that end the archive."""
    entries = b"".join(map(_central, members, crcs))
    return entries + _end_records(len(members), len(entries), _end(members[-1]))
