"""Parse the central directory of a zip archive whose members are stored, not compressed, as in a
torch.save file.

It is stricter than Python's zipfile: it refuses an archive that two readers could understand
differently. Source: PKWARE APPNOTE 6.3.10, sections 4.3 to 4.5.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from operator import add, gt, itemgetter
from typing import NamedTuple

from ckptmap.errors import SourceError

U32 = 0xFFFFFFFF
U16 = 0xFFFF
ENCRYPTED = 0x2041
"""Flag bits: encrypted, strongly encrypted, directory masked."""

LOCAL = struct.Struct("<4s2x2H16x2H")
_CENTRAL = struct.Struct("<4s4x2H4x3I3H8xI")
DESCRIPTOR = b"PK\7\x08"
"""The first bytes of a data descriptor. The CRC-32 of the member follows."""
CRC_NBYTES = 4
LOCAL_CRC_AT = 14
"""The byte of a local header at which the CRC-32 of the member begins; 0 if a descriptor has it."""
_CRC_AT = 16
"""The byte of a directory entry at which the CRC-32 of the member begins."""


class ZipEntry(NamedTuple):
    """A member: the offset of its local header, its size in bytes, and its CRC-32 (0 if left out)."""

    header: int
    nbytes: int
    crc32: int
    limit: int
    """Offset in the archive of the next member or of the directory. This member must end before it."""


class Entries(Mapping[str, ZipEntry]):
    """The members of an archive by name, kept in columns: a ZipEntry is made on access."""

    def __init__(
        self,
        numbers: Mapping[str, int],
        headers: Sequence[int],
        sizes: Sequence[int],
        crcs: Sequence[int],
        limits: Sequence[int],
    ) -> None:
        self._numbers, self._headers, self._limits = numbers, headers, limits
        self._sizes, self._crcs = sizes, crcs
        self.has_crcs = any(crcs)
        """Whether a CRC-32 is stated for any member."""

    def __getitem__(self, name: str) -> ZipEntry:
        i = self._numbers[name]
        return ZipEntry(self._headers[i], self._sizes[i], self._crcs[i], self._limits[i])

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def columns(self, names: Sequence[str]) -> Iterator[Sequence[int]]:
        """Yield four columns for these members: headers, sizes, CRC-32s, limits. Raise KeyError."""
        numbers = list(map(self._numbers.__getitem__, names))
        for column in (self._headers, self._sizes, self._crcs, self._limits):
            yield list(map(column.__getitem__, numbers))

    def sizes_of(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of each member; -1 for a name that is not in the archive."""
        numbers = map(self._numbers.get, names, repeat(-1))
        return list(map([*self._sizes, -1].__getitem__, numbers))


def bad(file: str, what: str) -> SourceError:
    """Return the error CKM105 for a malformed archive."""
    return SourceError(
        "CKM105",
        f"{file}: {what}",
        "the file is damaged, or another program than torch.save wrote it; copy it again",
    )


def truncated(file: str, what: str) -> SourceError:
    """Return the error CKM104 for an archive that ends too early."""
    return SourceError("CKM104", f"{file}: truncated: {what}", "copy or download it again")


def parse_directory(file: str, raw: bytes, count: int, end: int) -> tuple[str, Entries]:
    """Return the one root folder, and the members by their names below it.

    `raw` is the central directory; the end record announces `count` members, and the last one ends
    before byte `end`. Raise SourceError CKM105.
    """
    members = _parse(file, raw, count)
    if not members.names:
        raise bad(file, "is an empty zip archive")
    root = _check_names(file, members.names)
    return root, _entries(file, members, len(root) + 1, end)


def crc32_at(raw: bytes, name: bytes) -> int:
    """Return where the CRC-32 of a member of this full name begins in the directory `raw`; -1 if
    the directory has no such entry."""
    at = raw.rfind(name)
    while at >= 0:
        entry = at - _CENTRAL.size
        is_entry = entry >= 0 and raw.startswith(b"PK\1\2", entry)
        if is_entry and _CENTRAL.unpack_from(raw, entry)[6] == len(name):
            return entry + _CRC_AT
        at = raw.rfind(name, 0, at)
    return -1


class _Members(NamedTuple):
    """Columns, in directory order: name, offset of the local header, bytes, CRC-32."""

    names: Sequence[str]
    headers: Sequence[int]
    sizes: Sequence[int]
    crcs: Sequence[int]


def _parse(file: str, raw: bytes, count: int) -> _Members:
    """Return the columns of all members; raise SourceError CKM105 with the name of a bad member."""
    members: list[tuple[str, int, int, int]] = []
    at, end, fixed = 0, len(raw), _CENTRAL.size
    unpack = _CENTRAL.unpack_from
    while at < end:
        if end - at < fixed:
            raise bad(file, "malformed zip directory")
        (sig, flags, method, crc, packed, nbytes, name_n, extra_n, comment_n, header) = unpack(
            raw, at
        )
        name_at = at + fixed
        at = name_at + name_n + extra_n + comment_n
        if sig != b"PK\1\2" or at > end:
            raise bad(file, "malformed zip directory")
        try:
            name = raw[name_at : name_at + name_n].decode()
        except UnicodeDecodeError:
            raise bad(
                file, f"member name {raw[name_at : name_at + name_n][:80]!r} is not UTF-8"
            ) from None
        if nbytes == U32 or packed == U32 or header == U32:
            extra = raw[name_at + name_n : name_at + name_n + extra_n]
            nbytes, packed, header = _wide_fields(file, name, extra, nbytes, packed, header)
        if method or packed != nbytes:
            raise bad(file, f"{name}: is compressed; expected a stored member")
        if flags & ENCRYPTED:
            raise bad(file, f"{name}: is encrypted")
        if name[-1:] != "/":
            members.append((name, header, nbytes, crc))
        elif nbytes:
            raise bad(file, f"{name}: a folder that holds {nbytes} bytes")
        count -= 1
    if count:
        raise bad(
            file, f"its directory holds {-count:+d} members more or less than its end record states"
        )
    return _Members(
        [member[0] for member in members],
        [member[1] for member in members],
        [member[2] for member in members],
        [member[3] for member in members],
    )


def _wide_fields(
    file: str, name: str, extra: bytes, nbytes: int, packed: int, header: int
) -> tuple[int, int, int]:
    """Return (nbytes, packed, header) from the zip64 extra field (APPNOTE 4.5.3).

    It has 8 bytes for each of these fields that is 0xFFFFFFFF in the entry, in this order.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + size]
            values = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            try:
                nbytes = next(values) if nbytes == U32 else nbytes
                packed = next(values) if packed == U32 else packed
                return nbytes, packed, next(values) if header == U32 else header
            except StopIteration:
                break
        at += 4 + size
    raise bad(file, f"{name}: malformed zip64 extra field")


def _check_names(file: str, names: Sequence[str]) -> str:
    """Return the one root folder. Raise SourceError for a doubled, outside or unsafe name."""
    root = names[0].split("/", 1)[0]
    if len(set(names)) != len(names):
        ordered = sorted(names)
        twice = next(a for a, b in itertools.pairwise(ordered) if a == b)
        raise bad(file, f"{twice}: is there twice")
    prefix = root + "/"
    # If the first and the last name in sorted order begin with the prefix, so do all between them.
    for name in (min(names), max(names)):
        if not name.startswith(prefix) or not root:
            raise bad(file, f"member {name[:80]!r} lies outside its root folder {root[:80]!r}")
    text = "".join(names)  # one search in all names at once; only a bad file needs the loop
    if "\\" in text or "\0" in text or ".." in text:
        for name in names:
            if "\\" in name or "\0" in name or ".." in name.split("/"):
                raise bad(file, f"member {name[:80]!r} has an unsafe name")
    return root


def _entries(file: str, members: _Members, prefix: int, directory: int) -> Entries:
    """Return the entries by name below the root. Raise SourceError if a member overlaps the next."""
    names, headers, sizes, crcs = members
    if any(map(gt, headers, headers[1:])):  # in another order than in the file
        ordered = sorted(zip(names, headers, sizes, crcs, strict=True), key=itemgetter(1))
        names, headers, sizes, crcs = zip(*ordered, strict=True)
    limits = [*headers[1:], directory]
    ends = map(add, map(add, headers, map(len, names)), sizes)
    room = [limit - LOCAL.size for limit in limits]
    if any(map(gt, ends, room)):
        for name, header, nbytes, limit in zip(names, headers, sizes, limits, strict=True):
            if header + LOCAL.size + len(name) + nbytes > limit:
                raise bad(file, f"{name}: overlaps the member or directory at byte {limit}")
    numbers = dict(zip([name[prefix:] for name in names], range(len(names)), strict=True))
    return Entries(numbers, headers, sizes, crcs, limits)
