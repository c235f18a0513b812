"""Read a zip archive whose members are stored, not compressed, as torch.save writes it; zip64 included.

The central directory is read at once. It does not tell where the data of a member starts, because the
extra field of the member's local header may have another length than the directory's. So the local
header is read when the member is used. Source: PKWARE APPNOTE 6.3.10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from operator import add, gt, sub
from pathlib import Path
from typing import NamedTuple

from ckptmap.core.formatting import human
from ckptmap.errors import SourceError
from ckptmap.formats.zip.directory import (
    CRC_NBYTES,
    DESCRIPTOR,
    ENCRYPTED,
    LOCAL,
    LOCAL_CRC_AT,
    U16,
    U32,
    Entries,
    ZipEntry,
    bad,
    crc32_at,
    parse_directory,
    truncated,
)
from ckptmap.protocols.file_systems import Fingerprint, Mounts
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.files import Files

SMALL_NBYTES = 16 << 10
"""Bytes up to which an archive is read whole. Most such archives are items of a DCP file, of one tensor
each."""

TAIL_NBYTES = 4 << 10
"""Bytes at the end of a larger archive that are read first. They hold the whole directory of a few
tensors."""

BLOCK_NBYTES = 256 << 10
NEAR_NBYTES = 16 << 10
FEW = 64
"""Local headers at most NEAR_NBYTES bytes apart are read a block of BLOCK_NBYTES bytes at a time, if the
archive has more than FEW members; others are read one by one."""

MAX_COMMENT = 0xFFFF

_MAGIC = b"PK\3\4"
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")


def is_zip(file: Path, mounts: Mounts) -> bool:
    """Return True if the file begins with the local header of a zip member."""
    try:
        return mounts.read_head(file, len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class Record(NamedTuple):
    """A member: the offset of its first data byte in the file, its size, and its CRC-32 (None if the writer
    left it out)."""

    name: str
    file: str
    offset: int
    nbytes: int
    crc32: int | None


class Window:
    """The bytes of an archive that begins at byte `base` of a file. It keeps the block read last."""

    def __init__(self, files: Files, file: str, base: int, nbytes: int | None) -> None:
        if nbytes is None:
            nbytes = _file_nbytes(files, file) - base
        self.files, self.file, self.base, self.nbytes = files, file, base, nbytes
        self._start = 0 if nbytes <= SMALL_NBYTES else nbytes - TAIL_NBYTES
        self._tail = files.read(file, base + self._start, nbytes - self._start)
        self._block: tuple[int, bytes] = (0, b"")

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the archive. Raise SourceError CKM104 if it is too short."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise truncated(
                self.file, f"expected bytes {offset}..{offset + nbytes}, found {self.nbytes}"
            )
        at = offset - self._start
        if at >= 0:
            return self._tail[at : at + nbytes]
        return self.files.read(self.file, self.base + offset, nbytes)

    def read_near(self, offset: int, nbytes: int) -> bytes:
        """Return the same bytes, from a block that also holds those after them."""
        start, block = self._block
        at = offset - start
        if at < 0 or at + nbytes > len(block):
            block = self.read(offset, max(nbytes, min(BLOCK_NBYTES, self.nbytes - offset)))
            self._block, at = (offset, block), 0
        return block[at : at + nbytes]


def _file_nbytes(files: Files, file: str) -> int:
    try:
        return Fingerprint.of(file, files.mounts).nbytes
    except OSError as error:
        raise SourceError(
            "CKM101", f"{file}: cannot be read: {error.strerror}", "check the path"
        ) from error


class Records:
    """The members of an archive, by their names below its one root folder."""

    def __init__(self, window: Window, root: str, entries: Entries) -> None:
        self.root = root
        self._root = f"{root}/".encode()
        self._many = len(entries) > FEW
        self.file = window.file
        self.base = window.base
        self._window = window
        self._entries = entries
        self.unwaited = 0
        """Number of gathered tensors that were saved before torch had waited for all of their bytes."""

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a member, from the directory. Raise SourceError CKM105."""
        entry = self._entries.get(name)
        return self._entry(name)[1] if entry is None else entry[1]

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return name -> bytes of the members with this prefix."""
        return {n: entry[1] for n, entry in self._entries.items() if n.startswith(prefix)}

    def sizes_of(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of these members; -1 for a name that is not in the archive."""
        return self._entries.sizes_of(names)

    def starts(self, prefix: str) -> Mapping[str, int]:
        """Return name without prefix -> file offset of the data, for the members with this prefix."""
        names = [name for name in self._entries if name.startswith(prefix)]
        offsets, _ = self.locate_all(names)
        self._window.files.forget(self.file)  # the file is not read again, so it need not stay open
        return {name[len(prefix) :]: at for name, at in zip(names, offsets, strict=True)}

    def crc32(self, name: str) -> int | None:
        """Return the CRC-32 of a member; None: the writer left it out."""
        entry = self._entry(name)
        return entry.crc32 if entry.crc32 or not entry.nbytes else None

    def __getitem__(self, name: str) -> Record:
        """Return a member; the start of its data is read from its local header."""
        return Record(name, self.file, *self.locate(name))

    def locate(self, name: str) -> tuple[int, int, int | None]:
        """Return (offset, nbytes, CRC-32) of a member. Raise SourceError CKM105."""
        header, nbytes, crc32, limit = self._entries.get(name) or self._entry(name)
        full, fixed = self._root + name.encode(), LOCAL.size
        near = self._many and limit - header < NEAR_NBYTES
        read = self._window.read_near if near else self._window.read
        raw = read(header, fixed + len(full))
        sig, flags, method, name_nbytes, extra_nbytes = LOCAL.unpack_from(raw)
        if sig != _MAGIC or method or flags & ENCRYPTED:
            raise bad(self.file, f"{name}: its local header is not that of a stored member")
        if name_nbytes != len(full) or not raw.endswith(full):
            raise bad(self.file, f"{name}: its local header names {raw[fixed:][:80]!r}")
        start = header + fixed + name_nbytes + extra_nbytes
        if start + nbytes > limit:
            raise bad(self.file, f"{name}: overlaps the member or directory at byte {limit}")
        crc = self._stated(name, header, start, nbytes, crc32)
        self._window.files.mounts.state(self.file, [(self.base + start, nbytes, crc)])
        return self.base + start, nbytes, crc

    def locate_all(self, names: Sequence[str]) -> tuple[list[int], list[int | None]]:
        """Return the offsets and the CRC-32s of many members: `locate` in columns."""
        if not names:
            return [], []
        try:
            headers, sizes, crcs, limits = self._entries.columns(names)
        except KeyError:
            return self._one_by_one(names)
        fulls = [self._root + name.encode() for name in names]
        lengths, fixed = list(map(len, fulls)), LOCAL.size
        near = self._many and max(map(sub, limits, headers)) < NEAR_NBYTES
        read = self._window.read_near if near else self._window.read
        raws = [read(at, fixed + n) for at, n in zip(headers, lengths, strict=True)]
        if [raw[fixed:] for raw in raws] != fulls:
            return self._one_by_one(names)
        heads = LOCAL.iter_unpack(b"".join([raw[:fixed] for raw in raws]))
        signatures, flags, methods, name_sizes, extras = zip(*heads, strict=True)
        starts = [at + fixed + n for at, n in zip(headers, map(add, lengths, extras), strict=True)]
        odd = {*signatures} != {_MAGIC} or any(methods) or list(name_sizes) != lengths
        if odd or any(flag & ENCRYPTED for flag in {*flags}):
            return self._one_by_one(names)
        if any(map(gt, map(add, starts, sizes), limits)):
            return self._one_by_one(names)
        stated = list(map(self._stated, names, headers, starts, sizes, crcs))
        offsets = [self.base + start for start in starts]
        self._window.files.mounts.state(self.file, zip(offsets, sizes, stated, strict=True))
        return offsets, stated

    def _stated(self, name: str, header: int, start: int, nbytes: int, crc: int) -> int | None:
        """Return the CRC-32 that is stated for a member; None: its writer left it out.

        torch writes a 0 into the directory and into the data descriptor then: of all members with
        `set_crc32_options(False)`, of the storages with `skip_data`. Where the directory alone has
        a 0, it is damaged. Raise SourceError CKM105.
        """
        if crc or not nbytes:
            return crc
        if not self._entries.has_crcs:  # so that not every member's descriptor is read
            return None
        descriptor = self._window.read(start + nbytes, len(DESCRIPTOR) + CRC_NBYTES)
        other = descriptor[len(DESCRIPTOR) :]
        if not descriptor.startswith(DESCRIPTOR):
            other = self._window.read(header + LOCAL_CRC_AT, CRC_NBYTES)
        if any(other):
            raise bad(
                self.file,
                f"{name}: its directory states no CRC-32, the member itself"
                f" {int.from_bytes(other, 'little'):08x}",
            )
        return None

    def _one_by_one(self, names: Sequence[str]) -> tuple[list[int], list[int | None]]:
        """Return the same by `locate`, which names the member in its error."""
        located = [self.locate(name) for name in names]
        return [at for at, _, _ in located], [crc for _, _, crc in located]

    def read(self, name: str, *, limit: int = 1 << 30, check: bool = False) -> bytes:
        """Return the bytes of a member, at most `limit`; with `check`, verify the CRC-32."""
        record = self[name]
        if record.nbytes > limit:
            raise bad(self.file, f"{name}: {human(record.nbytes)}, expected at most {human(limit)}")
        data = self._window.read(record.offset - self.base, record.nbytes)
        if check:
            self._compare(record, crc32(data))
        return data

    def check(self, name: str) -> None:
        """Verify the CRC-32 of a member, a block at a time, since it may be large. Raise SourceError CKM105
        if it differs."""
        record, crc = self[name], 0
        start, end = record.offset - self.base, record.offset - self.base + record.nbytes
        for at in range(start, end, BLOCK_NBYTES):
            crc = crc32(self._window.read(at, min(BLOCK_NBYTES, end - at)), crc)
        self._compare(record, crc)

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Return (offset, nbytes) in the file of the data of a member, and of each CRC-32 of it.

        The CRC-32s are those of the data descriptor, if there is one, and of the directory.
        Raise SourceError CKM105."""
        record = self[name]
        spans = [(record.offset, record.nbytes)]
        end = record.offset - self.base + record.nbytes
        if self._window.read(end, len(DESCRIPTOR)) == DESCRIPTOR:
            spans.append((self.base + end + len(DESCRIPTOR), CRC_NBYTES))
        _, nbytes, directory = _find_directory(self._window)
        at = crc32_at(self._window.read(directory, nbytes), self._root + name.encode())
        if at < 0:
            raise bad(self.file, f"{name}: is not in the directory")
        return [*spans, (self.base + directory + at, CRC_NBYTES)]

    def _compare(self, record: Record, crc: int) -> None:
        if record.crc32 is not None and crc != record.crc32:
            raise bad(
                self.file,
                f"{record.name}: damaged: expected CRC-32 {record.crc32:08x}, found {crc:08x}",
            )

    def _entry(self, name: str) -> ZipEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise bad(self.file, f"has no member {name[:80]!r}") from None


def read_records(files: Files, file: str, base: int = 0, nbytes: int | None = None) -> Records:
    """Return the members of the archive in `nbytes` bytes of `file` from `base` on (default: all).

    Raise SourceError CKM104 if its end is missing, CKM105 if a member is compressed or encrypted, occurs
    twice, lies outside the one root folder, overlaps another member or ends past the file.
    """
    window = Window(files, file, base, nbytes)
    if window.nbytes < _END.size:
        raise truncated(file, f"expected a zip archive, found {window.nbytes} bytes")
    count, directory_nbytes, directory = _find_directory(window)
    raw = window.read(directory, directory_nbytes)
    root, entries = parse_directory(file, raw, count, directory)
    return Records(window, root, entries)


def _find_directory(window: Window) -> tuple[int, int, int]:
    """Return (members, nbytes, offset) of the central directory, from the end records."""
    end_at, fields = _find_end(window)
    count, nbytes, offset = fields
    stop = end_at
    if end_at >= _LOCATOR.size:
        raw = window.read(end_at - _LOCATOR.size, _LOCATOR.size)
        sig, _, end64_at, disks = _LOCATOR.unpack(raw)
        if sig == b"PK\6\7":
            if disks > 1 or end64_at + _END64.size > end_at - _LOCATOR.size:
                raise bad(window.file, "malformed zip64 locator")
            wide = _END64.unpack(window.read(end64_at, _END64.size))
            if wide[0] != b"PK\6\6":
                raise bad(window.file, "malformed zip64 end record")
            for narrow, exact, top in zip(fields, wide[7:10], (U16, U32, U32), strict=True):
                if narrow not in (exact, top):
                    raise bad(window.file, "its end record and its zip64 end record disagree")
            count, nbytes, offset = wide[7:10]
            stop = end64_at
    if offset + nbytes != stop:
        raise bad(
            window.file, f"expected its directory to end at byte {stop}, found {offset + nbytes}"
        )
    return count, nbytes, offset


def _find_end(window: Window) -> tuple[int, tuple[int, int, int]]:
    """Return the offset of the end record, and its (members, directory nbytes, directory offset)."""
    near = window.nbytes - _END.size
    raw = window.read(near, _END.size)
    if raw[:4] == b"PK\5\6" and raw[20:] == b"\0\0":
        at = near
    else:
        back = min(window.nbytes, _END.size + MAX_COMMENT)
        tail = window.read(window.nbytes - back, back)
        start = tail.rfind(b"PK\5\6", 0, len(tail) - _END.size + 4)
        if start < 0:
            raise truncated(window.file, "the zip directory at its end is missing")
        raw = tail[start : start + _END.size]
        at = window.nbytes - back + start
        after = window.nbytes - at - _END.size
        if int.from_bytes(raw[20:], "little") != after:
            raise bad(window.file, f"{after} bytes follow the end of the archive")
    _, disk, start_disk, here, count, nbytes, offset, _ = _END.unpack(raw)
    if disk not in (0, U16) or start_disk not in (0, U16) or here != count:
        raise bad(window.file, "is a part of a split archive")
    return at, (count, nbytes, offset)


def stem(name: str) -> str:
    """Return the root folder that torch.save writes for a file of this name: without its suffix."""
    return Path(name).stem or "archive"
