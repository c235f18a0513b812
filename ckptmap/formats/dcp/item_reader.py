"""Read the items of DCP data files (`__R_0.distcp`).

An item is a complete torch.save archive of one chunk or one value, at (offset, length) in its file;
`.metadata` tells both numbers. Parsing an item with all checks takes about 60 us. In one save, items of chunks of the same shape
and dtype differ only in data, checksums and torch's content id. So the first item of such a kind is
parsed in full. The bytes of the others, except these three, are compared with it (about 12 us).
Items of equal constants are equal to the byte: an optimizer with a group for each parameter has thousands.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptmap.core.state_paths import ATOMS, RESOLVED, UNRESOLVED
from ckptmap.errors import SourceError
from ckptmap.formats.dcp.half_saved import HINT
from ckptmap.formats.dcp.metadata_records import Item
from ckptmap.formats.safetensors.file import looks_like_safetensors
from ckptmap.formats.torch_save.reader import Loaded, load
from ckptmap.protocols.file_systems import Fingerprint, Mounts
from ckptmap.storage.files import Files
from ckptmap.tensors import Opaque, Region, StatedSum, StoredTensor, TensorInfo

CONTENT_ID = ".data/serialization_id"
DESCRIPTOR = b"PK\x07\x08"
ENTRY = b"PK\x01\x02"
ENTRY_NBYTES = 46
SMALL_NBYTES = 16 << 10
BLOCK_NBYTES = 256 << 10
"""Items of up to SMALL_NBYTES bytes that follow each other are read in blocks of BLOCK_NBYTES bytes."""
PLAIN_OVERHEAD = range(900, 2300)
"""Bytes of a plain tensor's item that are not data: 1513 to 1577 with torch 2.13, about 1100 with
older releases. A tensor subclass of several storages, or another alignment, is outside the range."""

AS_SAFETENSORS = (
    "expected a torch.save archive, found safetensors, as"
    " FileSystemWriter(serialization_format=SAFETENSORS) writes; .metadata has no place for the single"
    " tensors of such a file, and torch cannot load it either"
)
SAVE_TO_READ = (
    "save again without serialization_format, or with HuggingFaceStorageWriter(PATH,"
    " save_distributed=True)"
)
VALUE_NBYTES = 2 << 10
"""Up to so many bytes an item of a value is looked up by its bytes; one of a number has about 1261."""
MAX_KNOWN_VALUES = 256
TOGETHER = 256
"""Number of items whose headers are read by one call of `Files.read_each`."""

Located: TypeAlias = tuple[Region, int | None]
"""The region of a chunk, and its CRC-32; None if the writer left the CRC-32 out."""
Part: TypeAlias = tuple[str, Item, tuple[int, ...]]
"""The file, the item and the sizes of a chunk."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The bytes that all items of one kind share: `head` before the data, and the runs `fixed` (start,
    bytes) of the tail after the data."""

    head: bytes
    tail_nbytes: int
    fixed: tuple[tuple[int, bytes], ...]
    crc_at: int
    """Offset of the data's CRC-32 in the tail."""
    region: Region
    """Region of the first item of the kind; its offset is relative to the item."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of head and tail together."""
        return len(self.head) + self.tail_nbytes

    def locate(self, raw: bytes | bytearray, at: int, file: str, item: Item) -> Located | None:
        """Return the region and CRC-32 of an item, whose head and tail are in `raw` from `at` on; None if
        it is of another kind."""
        tail = at + len(self.head)
        if not raw.startswith(self.head, at):
            return None
        for start, run in self.fixed:
            if not raw.startswith(run, tail + start):
                return None
        like, crc_at = self.region, tail + self.crc_at
        crc32 = int.from_bytes(raw[crc_at : crc_at + 4], "little")
        if not crc32:  # its writer left it out, or it is damaged: the zip's reader tells which
            return None
        region = Region(file, item.offset + like.offset, like.sizes, like.strides, like.itemsize)
        return region, crc32


class Items:
    """Reads items from the files of one checkpoint, and remembers the kinds that it has parsed.

    Tensors keep a reference to it, because they read their items later. Its files are closed when the
    last of these tensors is collected.
    """

    def __init__(self, mounts: Mounts) -> None:
        self._files = Files(mounts=mounts)
        self._block: tuple[str, int, bytes] = ("", 0, b"")
        weakref.finalize(self, self._files.close)
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._sizes: dict[str, int] = {}
        self._values: dict[bytes, tuple[object, list[StatedSum]]] = {}
        """By the bytes of an item: its constant, and the checksums that it states, by offset in the item."""

    def value(self, file: str, item: Item, key: str) -> Any:
        """Return the value in an item: a StoredTensor, an Opaque or a plain value. Raise SourceError
        CKM109 for a safetensors file, and the errors of reading a torch.save file."""
        if item.nbytes > VALUE_NBYTES:
            return self._load(file, item, key).tree
        raw = self._read(file, item.offset, item.nbytes, item)
        known = self._values.get(raw)
        if known is not None:
            value, sums = known
            self._files.mounts.state(file, [(item.offset + at, n, crc) for at, n, crc in sums])
            return value
        first = len(self._files.mounts.stated.get(file, ()))
        value = self._load(file, item, key).tree
        if _is_constant(value) and len(self._values) < MAX_KNOWN_VALUES:
            stated = self._files.mounts.stated[file][first:]
            sums = [one._replace(offset=one.offset - item.offset) for one in stated]
            self._values[raw] = value, sums
        return value

    def is_plain(self, file: str, item: Item, key: str, info: TensorInfo) -> bool:
        """Return True if the item holds a plain tensor; `.metadata` declares it as `info`."""
        kind = self._kinds.get((info.dtype, info.shape, item.nbytes))
        if kind is not None and self._same_kind(kind, file, item) is not None:
            return True
        return isinstance(self._learned(file, item, key, info.dtype, info.shape), StoredTensor)

    def region(
        self, file: str, item: Item, key: str, dtype: str, sizes: tuple[int, ...]
    ) -> Located:
        """Return the region and CRC-32 of a chunk that `.metadata` declares as `sizes` of `dtype`.

        Raise SourceError CKM112 if the item holds something else.
        """
        kind = self._kinds.get((dtype, sizes, item.nbytes))
        if kind is not None:
            located = self._same_kind(kind, file, item)
            if located is not None:
                self._state(*located)
                return located
        tensor = self._learned(file, item, key, dtype, sizes)
        if not isinstance(tensor, StoredTensor):
            raise _mismatch(file, item, key, f"{dtype}{list(sizes)}", _described(tensor))
        if tensor.info.dtype != dtype or tensor.info.shape != sizes:
            raise _mismatch(file, item, key, f"{dtype}{list(sizes)}", str(tensor.info))
        chunk = tensor.chunks[0]
        return chunk.region, chunk.crc32

    def regions(self, parts: Sequence[Part], key: str, dtype: str) -> list[Located]:
        """Return the regions and CRC-32 of all chunks of a tensor. Raise SourceError as `region`."""
        # The first item is read alone: most often, all others are of the kind that is learned from it.
        located = [self.region(*part[:2], key, dtype, part[2]) for part in parts[:1]]
        for at in range(1, len(parts), TOGETHER):
            some = parts[at : at + TOGETHER]
            kinds = [self._kinds.get((dtype, sizes, item.nbytes)) for _, item, sizes in some]
            alike = self._alike(some, kinds)
            for (file, item, sizes), same in zip(some, alike, strict=True):
                if same is not None:
                    self._state(*same)
                located.append(same or self.region(file, item, key, dtype, sizes))
        return located

    def _state(self, region: Region, crc32: int | None) -> None:
        """Note the CRC-32 of an item's one storage, which the region holds whole."""
        self._files.mounts.state(region.file, [(region.offset, region.nbytes, crc32)])

    def _learned(
        self, file: str, item: Item, key: str, dtype: str, sizes: tuple[int, ...]
    ) -> object:
        """Return the value in an item. If it is as declared, remember its kind."""
        loaded = self._load(file, item, key)
        tensor = loaded.tree
        if isinstance(tensor, StoredTensor) and tensor.info == TensorInfo(sizes, dtype):
            chunk = tensor.chunks[0]
            learned = _learn(self._files, loaded, item, chunk.region, chunk.crc32)
            if learned is not None:
                self._kinds[dtype, sizes, item.nbytes] = learned
        return tensor

    def _load(self, file: str, item: Item, key: str) -> Loaded:
        try:
            return load(self._files, file, item.offset, item.nbytes)
        except SourceError as error:
            text = error.message.removeprefix(file).removeprefix(": ")
            where = f"{file}: item {key!r} at byte {item.offset}"
            start = min(10, self._nbytes(file) - item.offset)
            if looks_like_safetensors(self._files.read(file, item.offset, start)):
                raise SourceError("CKM109", f"{where}: {AS_SAFETENSORS}", SAVE_TO_READ) from error
            hint = HINT if error.code in ("CKM104", "CKM105") else error.hint
            raise SourceError(error.code, f"{where}: {text}", hint) from error

    def _same_kind(self, kind: _Kind, file: str, item: Item) -> Located | None:
        """Return the region and CRC-32 if the item is of this kind; None if it must be parsed."""
        head = self._read(file, item.offset, len(kind.head), item)
        tail_at = item.offset + item.nbytes - kind.tail_nbytes
        return kind.locate(head + self._read(file, tail_at, kind.tail_nbytes, item), 0, file, item)

    def _alike(
        self, parts: Sequence[Part], kinds: Sequence[_Kind | None]
    ) -> Iterator[Located | None]:
        """Yield what `_same_kind` returns, for many items. Their heads and tails are read together."""
        raw = bytearray(sum([kind.nbytes for kind in kinds if kind is not None]))
        reads, at, view = [], 0, memoryview(raw)
        for (file, item, _), kind in zip(parts, kinds, strict=True):
            if kind is not None:
                tail, end = at + len(kind.head), at + kind.nbytes
                reads.append((file, item.offset, view[at:tail]))
                reads.append((file, item.offset + item.nbytes - kind.tail_nbytes, view[tail:end]))
                at = end
        self._files.read_each(reads)
        at = 0
        for (file, item, _), kind in zip(parts, kinds, strict=True):
            yield None if kind is None else kind.locate(raw, at, file, item)
            at += 0 if kind is None else kind.nbytes

    def _read(self, file: str, offset: int, nbytes: int, item: Item) -> bytes:
        """Return bytes of an item. Small items that follow each other in a file are read in blocks. An
        item in another file than the last one is read alone: chunks of many ranks alternate."""
        if item.nbytes > SMALL_NBYTES:
            return self._files.read(file, offset, nbytes)
        block_file, start, block = self._block
        if block_file != file or not start <= offset <= start + len(block) - nbytes:
            ahead = BLOCK_NBYTES if block_file == file else item.offset + item.nbytes - offset
            end = min(offset + ahead, self._nbytes(file))
            block = self._files.read(file, offset, max(nbytes, end - offset))
            self._block = file, offset, block
            return block[:nbytes]
        return block[offset - start : offset - start + nbytes]

    def _nbytes(self, file: str) -> int:
        if file not in self._sizes:
            self._sizes[file] = Fingerprint.of(file, self._files.mounts).nbytes
        return self._sizes[file]


def _learn(
    files: Files, loaded: Loaded, item: Item, region: Region, crc32: int | None
) -> _Kind | None:
    """Return the kind of a parsed item; None if the item has no CRC-32, has several storages, or has a
    central directory that torch does not write."""
    names = [name for name in loaded.records if name.startswith("data/")]
    if crc32 is None or len(names) != 1:
        return None
    head_nbytes = region.offset - item.offset
    tail_nbytes = item.nbytes - head_nbytes - region.nbytes
    tail = files.read(region.file, region.offset + region.nbytes, tail_nbytes)
    free = []  # (start, nbytes) of the bytes in the tail that differ between items of the kind
    crc_at = -1
    for name in (names[0], CONTENT_ID):
        if name not in loaded.records:
            continue
        record = loaded.records[name]
        end = record.offset + record.nbytes - region.offset - region.nbytes
        if name == CONTENT_ID:
            free.append((end - record.nbytes, record.nbytes))
        if tail[end : end + 4] == DESCRIPTOR:
            free.append((end + 4, 4))
        entry = tail.rfind(f"{loaded.records.root}/{name}".encode()) - ENTRY_NBYTES
        stated = int.from_bytes(tail[entry + 16 : entry + 20], "little")
        if entry < 0 or tail[entry : entry + 4] != ENTRY or stated != (record.crc32 or 0):
            return None
        free.append((entry + 16, 4))
        if name != CONTENT_ID:
            crc_at = entry + 16
    head = files.read(region.file, item.offset, head_nbytes)
    like = Region(region.file, head_nbytes, region.sizes, region.strides, region.itemsize)
    return _Kind(head, tail_nbytes, _between(tail, free), crc_at, like)


def _between(tail: bytes, free: list[tuple[int, int]]) -> tuple[tuple[int, bytes], ...]:
    """Return the (start, bytes) runs of `tail` outside of the `free` ranges."""
    runs = []
    at = 0
    for start, nbytes in sorted(free):
        if start > at:
            runs.append((at, tail[at:start]))
        at = start + nbytes
    runs.append((at, tail[at:]))
    return tuple(runs)


def _is_constant(value: object) -> bool:
    """Return True for a value that nobody can change: a number, a string, or betas."""
    return type(value) in ATOMS or (
        type(value) is tuple and all(type(item) in ATOMS for item in value)
    )


def _described(value: object) -> str:
    if isinstance(value, Opaque) and value.is_unresolved:
        return UNRESOLVED
    return repr(value)[:80] if hasattr(value, "class_name") else type(value).__name__


def _mismatch(file: str, item: Item, key: str, declared: str, actual: str) -> SourceError:
    if actual is UNRESOLVED:
        return SourceError(
            "CKM112", f"{file}: item {key!r} at byte {item.offset}: is {actual}", RESOLVED
        )
    return SourceError(
        "CKM112",
        f"{file}: item {key!r} at byte {item.offset}: .metadata declares {declared}, "
        f"the item holds {actual}",
        "torch saves such directories from uneven FSDP + TP shards (_StridedShard, "
        "pytorch#161368); save again from even shards or as a full state dict",
    )
