"""Read the directories that `torch.distributed.checkpoint.save` (DCP) writes.

    .metadata       a pickle: shape, dtype and chunks of every tensor, and the place of every chunk
    __R_I.distcp    data file I of rank R: items, each a torch.save archive of one chunk or one value

Opening a directory reads `.metadata`, all plain values, and those few tensor items that may hold a
tensor subclass. The header of any other item is read when its tensor is. Source:
torch/distributed/checkpoint/filesystem.py, torch 1.13 to 2.13.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add
from pathlib import Path as FilePath
from typing import Any

from ckptmap.core.formatting import some
from ckptmap.core.row_chunks import RowChunks
from ckptmap.core.state_tree import holds_tensor
from ckptmap.core.tensor_columns import Extents, PlainTensors
from ckptmap.errors import SourceError
from ckptmap.formats.dcp.half_saved import half_saved
from ckptmap.formats.dcp.item_leaves import leaves_of_item
from ckptmap.formats.dcp.item_reader import PLAIN_OVERHEAD, Items
from ckptmap.formats.dcp.metadata_reader import read_metadata
from ckptmap.formats.dcp.metadata_records import Item, Metadata, TensorEntry, Whole
from ckptmap.protocols import Index, Place
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.resource_limits import unreadable
from ckptmap.storage.safe_names import inside
from ckptmap.tensors import (
    Box,
    Chunk,
    Cut,
    Extent,
    Leaf,
    Opaque,
    Path,
    Places,
    Region,
    StoredTensor,
    TensorInfo,
    as_inert,
)

METADATA = ".metadata"
RECORD_SUFFIX = ".__ckptmap__"
"""The item `P.__ckptmap__` is the record of how ckptmap quantized tensor P, not a value of the state
dict."""

SIDE_FILE = re.compile(r"[^.].*\.(pt|pth|bin|pkl|ckpt|safetensors)")
"""Files that a training loop may write beside the shards (a scheduler, random states). `.metadata` does
not describe them."""
RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")
MAX_METADATA_NBYTES = 1 << 30
SMALL_NBYTES = 16 << 10
"""Bytes up to which an item of a tensor subclass may be as long as one of a plain tensor, so that the
length does not tell them apart."""
MAX_SAMPLES = 32
"""Number of small items that are read to learn whether a directory holds tensor subclasses."""


class Dcp:
    """Reads a DCP directory. No byte of a tensor's data is read before its chunks are used."""

    name = "dcp"

    def claims(self, place: Place) -> bool:
        """Return True if there is a `.metadata`: torch writes it last, so the save is complete."""
        return place.is_dir and METADATA in place.names

    def index(self, place: Place) -> Index:
        """Return every leaf of the state dict, tensors as chunks of the data files.

        Raise SourceError CKM101 if `.metadata` cannot be read, CKM104 for a truncated data file, CKM105
        or CKM106 for a damaged item, CKM109 for malformed metadata or a missing data file, CKM112 for
        an item of another shape than its metadata, CKM115 for a malformed encoding record, CKM116 for
        a data file outside the directory.
        """
        root = str(FilePath(place.path).absolute())
        where = str(FilePath(root) / METADATA)
        metadata = read_metadata(_metadata_bytes(root, place.names, place.mounts), where)
        files = _data_files(root, metadata, where)
        leaves, records = _Leaves(files, where, place.mounts).read(metadata)
        used = {FilePath(file).name for file in files.values()}
        return Index(
            self.name,
            leaves,
            (*files.values(), where),
            records=records,
            world=_world(used),
            notes=(*_notes(place.names, used), *half_saved(files.values(), where)),
            unread_files=tuple(filter(SIDE_FILE.fullmatch, place.names)),
            keeps_order=_by_first_rank,
        )


FIRST_RANK = "__0_"
"""How the names of what rank 0 writes begin: torch/distributed/checkpoint/filesystem.py."""


def _by_first_rank(stored: StoredTensor) -> bool:
    """Return True if rank 0 wrote a chunk of the tensor.

    `.metadata` lists the tensors of rank 0 first, in the order of its state dict. Tensors that only
    other ranks wrote come after them, in an order that says nothing: torch spreads replicated tensors
    over the ranks by size.
    """
    return any(FilePath(chunk.region.file).name.startswith(FIRST_RANK) for chunk in stored.chunks)


def _metadata_bytes(root: str, names: Sequence[str], mounts: Mounts) -> bytes:
    if METADATA not in names:
        why = "; the save died before it finished" if ".metadata.tmp" in names else ""
        raise SourceError(
            "CKM109",
            f"{root}: the file {METADATA} is missing{why}",
            "use an earlier checkpoint, or save again",
        )
    path = FilePath(root) / METADATA
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_METADATA_NBYTES:
            raise SourceError(
                "CKM109",
                f"{path}: {nbytes >> 20:,} MiB, expected at most {MAX_METADATA_NBYTES >> 20} MiB",
                "this is not the metadata of a DCP directory; copy the directory again, or save again",
            )
        return mounts.local_copy(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _data_files(root: str, metadata: Metadata, where: str) -> dict[str, str]:
    """Return relative name -> path of every data file, in natural order; raise if one is too short."""
    files = {}
    for name, end in _ends(metadata, where).items():
        path = inside(root, name, where)
        if not os.path.isfile(path):
            raise SourceError(
                "CKM109",
                f"{where}: lists the data file {name!r}, which is missing",
                "copy the files of all ranks into one directory",
            )
        nbytes = os.stat(path).st_size
        if end > nbytes:
            raise SourceError(
                "CKM104",
                f"{path}: truncated, expected {end} bytes or more, found {nbytes}",
                "copy it again, or save again",
            )
        files[name] = path
    return files


def _ends(metadata: Metadata, where: str) -> dict[str, int]:
    """Return for each data file the byte after its last item."""
    ends: dict[str, int] = {}
    tensors = metadata.tensors
    if isinstance(tensors, Whole):
        rows = tensors.rows
        for file, end in zip(rows.files, map(add, rows.offsets, rows.lengths), strict=True):
            if end > ends.get(file, -1):
                ends[file] = end
        return ends
    for entry in tensors.values():
        for _, _, item in entry.chunks:
            _reach(ends, item, where)
    for item in metadata.values.values():
        _reach(ends, item, where)
    return ends


def _reach(ends: dict[str, int], item: Item, where: str) -> None:
    if item.transforms:
        raise SourceError(
            "CKM109",
            f"{where}: data in {item.file!r} is transformed by {', '.join(item.transforms)},"
            " expected plain torch.save archives",
            "load it with torch, and save it again without `_extensions`",
        )
    end = item.offset + item.nbytes
    if end > ends.get(item.file, -1):
        ends[item.file] = end


def _world(used: set[str]) -> int:
    """Return the number of ranks by the data files; too small if the last ranks wrote none."""
    ranks = [int(match[1]) for match in map(RANK_FILE.fullmatch, used) if match]
    return 1 + max(ranks, default=0)


def _notes(names: Sequence[str], used: set[str]) -> tuple[str, ...]:
    stale = [name for name in names if name.endswith(".distcp") and name not in used]
    if not stale:
        return ()
    return (f"not read, because an earlier save into this directory wrote it: {some(stale, 1)}",)


class _Leaves:
    """Turns metadata entries into leaves; reads the few items whose contents decide the leaves."""

    def __init__(self, files: Mapping[str, str], where: str, mounts: Mounts) -> None:
        self._files = files
        self._where = where
        self._items = Items(mounts)

    def read(
        self, metadata: Metadata
    ) -> tuple[Mapping[Path, Leaf], dict[str, Mapping[str, object]]]:
        """Return the leaves by path, and the encoding records by FQN."""
        run = None if metadata.values or metadata.paths else Whole.of(metadata.tensors)
        if run is not None and self._is_plain(metadata, run):
            return PlainTensors(run.names, run.rows.infos, _Places(self, run)), {}
        leaves: dict[Path, Leaf] = {}
        records: dict[str, Mapping[str, object]] = {}
        unusual = {key for key, entry in metadata.tensors.items() if _is_unusual(entry)}
        cuts = self._cuts(metadata, unusual | _samples(metadata))
        if cuts:  # then small items may hold subclasses too, and their lengths do not tell
            small = {k for k, e in metadata.tensors.items() if _is_small(e)} - unusual
            cuts |= self._cuts(metadata, small)
        for key, entry in metadata.tensors.items():
            leaf = (cuts and cuts.get(key)) or _DcpTensor(self, key, entry)
            leaves[metadata.path(key)] = leaf
        for key, item in metadata.values.items():
            value = self._items.value(self._files[item.file], item, key)
            if key.endswith(RECORD_SUFFIX):
                records[key.removesuffix(RECORD_SUFFIX)] = _record(value, key)
            elif holds_tensor(value):  # a dict that flatten_state_dict=False has left whole
                path = metadata.path(key)
                leaves.update(leaves_of_item(path, value, item.nbytes, self._where))
            else:
                leaves[metadata.path(key)] = value
        return leaves, records

    def _is_plain(self, metadata: Metadata, run: Whole) -> bool:
        """Return True if the items hold plain tensors, by the item sizes and by a few that are read."""
        infos, lengths = run.rows.infos, run.rows.lengths
        pairs = list(zip(map(id, infos), lengths, strict=True))
        first = dict(zip(reversed(pairs), range(len(pairs) - 1, -1, -1), strict=True))
        samples: set[str] = set()
        for index in sorted(first.values()):
            nbytes = lengths[index]
            if nbytes - infos[index].nbytes not in PLAIN_OVERHEAD:
                return False
            if nbytes < SMALL_NBYTES and len(samples) < MAX_SAMPLES:
                samples.add(run.names[index])
        return not self._cuts(metadata, samples)

    def _cuts(self, metadata: Metadata, keys: set[str]) -> dict[str, Cut]:
        """Return the tensors whose items hold objects of a tensor subclass."""
        cuts = {}
        for key in keys:
            entry = metadata.tensors[key]
            if all(
                self._items.is_plain(
                    self._files[i.file], i, key, TensorInfo(sizes, entry.info.dtype)
                )
                for _, sizes, i in entry.chunks
            ):
                continue
            values = [self._items.value(self._files[i.file], i, key) for _, _, i in entry.chunks]
            if any(isinstance(value, Opaque) for value in values):
                boxes = [Box(offsets, sizes) for offsets, sizes, _ in entry.chunks]
                inert = map(as_inert, values)  # a rank may hold a plain tensor where others do not
                cuts[key] = Cut(entry.info, tuple(zip(boxes, inert, strict=True)))
        return cuts

    def place(self, key: str, info: TensorInfo, item: Item) -> Places:
        """Return the region of a tensor of one chunk."""
        file = self._files[item.file]
        region, crc32 = self._items.region(file, item, key, info.dtype, info.shape)
        if region.is_contiguous:
            return Extent(file, region.offset, crc32)
        return (Chunk(Box.whole(info.shape), region, crc32),)

    def places(self, key: str, entry: TensorEntry) -> Places:
        """Return the region of every chunk; each item is compared with what `.metadata` declares."""
        from ckptmap.core.tiling import prove_tiling

        info = entry.info
        wrong = prove_tiling(
            info.shape, [Box(offsets, sizes) for offsets, sizes, _ in entry.chunks]
        )
        if wrong is not None:
            raise SourceError(
                "CKM112",
                f"{self._where}: tensor {key!r}: {wrong}, expected chunks that tile {info}",
                "a rank's chunk is missing; save again, or use an earlier checkpoint",
            )
        nonempty = [chunk for chunk in entry.chunks if 0 not in chunk[1]]
        parts = [(self._files[item.file], item, sizes) for _, sizes, item in nonempty]
        located = self._items.regions(parts, key, info.dtype)
        chunks = [
            Chunk(Box(offsets, sizes), *place)
            for (offsets, sizes, _), place in zip(nonempty, located, strict=True)
        ]
        if not chunks and entry.chunks:  # an empty tensor: one chunk of no bytes
            offsets, sizes, item = entry.chunks[0]
            file = self._files[item.file]
            region = Region.contiguous(file, item.offset, sizes, info.itemsize)
            chunks.append(Chunk(Box(offsets, sizes), region))
        return RowChunks.of(info, chunks) or chunks


@dataclass(frozen=True)
class _Places:
    """The places of tensors of one chunk each. Each item is read to learn where its data starts."""

    leaves: _Leaves
    run: Whole

    def locate(self, index: int) -> Places:
        """Return the place of the data of tensor `index`."""
        rows = self.run.rows
        item = Item(rows.files[index], rows.offsets[index], rows.lengths[index])
        return self.leaves.place(self.run.names[index], rows.infos[index], item)

    def locate_all(self) -> Extents | None:
        """Return the places of all tensors in columns; None if one is not contiguous."""
        places = list(map(self.locate, range(len(self.run))))
        extents = [place for place in places if isinstance(place, Extent)]
        return Extents.of(extents) if len(extents) == len(places) else None


class _DcpTensor(StoredTensor):
    """A tensor that reads the headers of its items on first access, to find the data in them.

    For a tensor of one chunk, only the item is kept and not its metadata entry: there may be 100,000.
    """

    __slots__ = ("_entry", "_key", "_leaves")

    def __init__(self, leaves: _Leaves, key: str, entry: TensorEntry) -> None:
        super().__init__(entry.info, ())
        self._place: Any = None
        self._leaves, self._key = leaves, key
        self._entry: TensorEntry | Item | None = entry
        if len(entry.chunks) == 1:
            offsets, sizes, item = entry.chunks[0]
            if sizes == entry.info.shape and not any(offsets) and 0 not in sizes:
                self._entry = item

    @property
    def place(self) -> Places:
        """Return the place of the tensor's data. The first use reads the headers of its items."""
        place: Places | None = self._place
        if place is None:
            entry = self._entry
            if type(entry) is Item:
                place = self._leaves.place(self._key, self.info, entry)
            else:
                place = self._leaves.places(self._key, entry)  # type: ignore[arg-type]
            self._place, self._entry = place, None
        return place


def _is_unusual(entry: TensorEntry) -> bool:
    """Return True if an item is longer or shorter than that of a plain tensor of its box."""
    itemsize = entry.info.itemsize
    for _, sizes, item in entry.chunks:
        if item.nbytes - itemsize * prod(sizes) not in PLAIN_OVERHEAD:
            return True
    return False


def _is_small(entry: TensorEntry) -> bool:
    return any(item.nbytes < SMALL_NBYTES for _, _, item in entry.chunks)


def _samples(metadata: Metadata) -> set[str]:
    """Return one small tensor of each of the first MAX_SAMPLES kinds (shape, dtype, item length).

    If all tensors of a subclass are small, their item lengths are those of plain tensors. Reading one
    item of each kind tells.
    """
    kinds: dict[tuple[TensorInfo, int], str] = {}
    for key, entry in metadata.tensors.items():
        if entry.chunks and entry.chunks[0][2].nbytes < SMALL_NBYTES:
            kinds.setdefault((entry.info, entry.chunks[0][2].nbytes), key)
            if len(kinds) == MAX_SAMPLES:
                break
    return set(kinds.values())


def _record(value: object, key: str) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise SourceError(
            "CKM115",
            f"item {key!r}: expected an encoding record, a dict of names, found {type(value).__name__}",
            "convert the original checkpoint again",
        )
    return value
