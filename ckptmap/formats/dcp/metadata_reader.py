"""Read the `.metadata` file of a DCP directory, a pickle of torch's `Metadata`, into plain records.

    Metadata{state_dict_metadata: {flat key: TensorStorageMetadata{properties, size, chunks}
                                            | BytesStorageMetadata},
             planner_data: {flat key: path tuple},
             storage_data: {MetadataIndex{fqn, offset}: _StorageInfo{relative_path, offset, length}}}

torch reads the file with `pickle.load`, which calls any function that the file names. This module
imports and calls nothing that the file names. Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch 1.13
to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import add
from typing import Any, NoReturn

from ckptmap.core.state_paths import ListIndex
from ckptmap.errors import SourceError
from ckptmap.formats.dcp.metadata_classes import (
    ALLOW,
    MARKS,
    Bytes,
    ChunkBox,
    Key,
    Properties,
    Root,
    StorageInfo,
    Tensor,
)
from ckptmap.formats.dcp.metadata_records import (
    Item,
    ItemRows,
    Metadata,
    Offsets,
    TensorEntry,
    Whole,
)
from ckptmap.formats.pickle import reader as pickle_read
from ckptmap.tensors import ITEMSIZE, Opaque, Path, TensorInfo

LONG_NBYTES = 1 << 16
"""Pickles of at least this many bytes are read faster when they are shortened first
(`metadata_compaction`)."""
MAX_DIMS = 64
MAX_NUMEL = 2**63 - 1


def read_metadata(data: bytes, where: str) -> Metadata:
    """Return the records of a `.metadata` file. `where` is its name in errors.

    Raise SourceError CKM106 for a pickle that is malformed or names a function that only an attack
    calls, CKM109 for a file that is empty, holds an object of another class, or contradicts itself.
    """
    if not data:
        raise SourceError(
            "CKM109",
            f"{where}: is empty (0 bytes): the save did not finish",
            "use an earlier checkpoint, or save again",
        )
    metadata = None
    if len(data) >= LONG_NBYTES:
        # The whole pickle has the same fault. It is read next, and its error has the right offset.
        with suppress(SourceError):
            metadata = _read_short(data, where)
    return metadata or _Reader(where).metadata(pickle_read.load(data, where, allow=ALLOW))


def _read_short(data: bytes, where: str) -> Metadata | None:
    """Return the records by way of the shorter pickle; None if torch did not write the pickle."""
    from ckptmap.formats.dcp.metadata_compaction import (
        shortened,  # imported here: its regular expressions take time to compile
    )

    short = shortened(data)
    if short is None:
        return None
    loaded = pickle_read.load(short.pickle, where, allow=ALLOW, of_nbytes=len(data))
    reader = _Reader(where)
    if type(loaded) is not tuple or [*map(type, loaded)][1:] != [tuple] * 4:
        reader._bad("the shortened pickle, expected the metadata and four tuples")
    root, *columns = loaded
    return reader.metadata(root, short.forms, *columns)


def _other_root(root: object, where: str) -> SourceError:
    if isinstance(root, Opaque):
        name = root.class_name
    else:
        name = "dict" if isinstance(root, dict) else type(root).__name__
    hint = "save again with torch.distributed.checkpoint.save, or open another directory"
    if name.startswith("bytecheckpoint."):
        hint = "ByteCheckpoint is another format; merge it with its own merge_bcp first"
    expected = "torch.distributed.checkpoint.metadata.Metadata"
    return SourceError("CKM109", f"{where}: expected {expected}, found {name}", hint)


class _Reader:
    """Checks the unpickled objects, and turns them into records. Its methods raise SourceError CKM109."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._infos: dict[tuple[object, ...], TensorInfo] = {}
        self._cut: dict[Tensor, tuple[TensorInfo, list[tuple[Offsets, Offsets]]]] = {}

    def metadata(self, root: object, *columns: Sequence[Any]) -> Metadata:
        """Return the records of the unpickled `Metadata`.

        `columns` are those of a shorter pickle (see `Shortened`): the form of each entry, the
        (key, place) pairs of the forms, fqns, offsets, lengths.
        """
        if type(root) is not Root:
            raise _other_root(root, self.where)
        entries = self._dict(root.state_dict_metadata, "state_dict_metadata")
        paths = self._paths(root.planner_data, entries)
        items = self._items(self._dict(root.storage_data, "storage_data"))
        if columns:
            rows = self._rows(items, *columns)
            whole = self._whole(entries, rows)
            if whole is not None:
                return Metadata(whole, {}, paths)
            items = rows.items()
            if len(items) != len(rows.fqns):
                self._bad("storage_data, holds an entry twice")
        tensors: dict[str, TensorEntry] = {}
        values: dict[str, Item] = {}
        for key, entry in entries.items():
            if type(entry) is Tensor:
                tensors[key] = self._tensor(key, entry, items)
            elif type(entry) is Bytes:
                values[key] = self._item_of(items, key, None)
            else:
                self._bad(f"entry {key!r}, expected a tensor or bytes, found {_show(entry)}")
        self._check_used(items, tensors, values)
        return Metadata(tensors, values, paths)

    def _check_used(
        self,
        items: Mapping[tuple[str, Offsets | None], Item],
        tensors: Mapping[str, TensorEntry],
        values: Mapping[str, Item],
    ) -> None:
        """Refuse an item that belongs to no entry: its bytes would be left behind."""
        if sum([len(entry.chunks) for entry in tensors.values()]) + len(values) == len(items):
            return
        used = {(key, at) for key, entry in tensors.items() for at, _, _ in entry.chunks}
        for fqn, at in items:
            if (fqn, at) not in used and not (at is None and fqn in values):
                self._bad(f"storage_data, {fqn!r} at {_show(at)} belongs to no entry")

    def _dict(self, value: object, name: str) -> dict[Any, object]:
        if not isinstance(value, dict):
            self._bad(f"{name}, expected a dict, found {_show(value)}")
        return value

    def _items(self, storage: dict[object, object]) -> dict[tuple[str, Offsets | None], Item]:
        items: dict[tuple[str, Offsets | None], Item] = {}
        for key, place in storage.items():
            if type(key) is not Key or type(place) is not StorageInfo:
                self._bad(f"storage_data, expected an item, found {_show(key)}: {_show(place)}")
            fqn, offsets = key.fqn, key.offset
            if type(fqn) is not str:
                self._bad(f"storage_data, expected a MetadataIndex with an FQN, found {_show(fqn)}")
            index = (fqn, None if offsets is None else self._ints(offsets, fqn))
            if index in items:
                self._bad(f"storage_data, holds {fqn!r} at {_show(index[1])} twice")
            items[index] = self._item(fqn, place)
        return items

    def _rows(
        self,
        items: Mapping[tuple[str, Offsets | None], Item],
        forms_of: Sequence[int],
        forms: Sequence[Any],
        fqns: Sequence[str],
        offsets: Sequence[int],
        lengths: Sequence[int],
    ) -> ItemRows:
        """Return the entries that were taken out of the pickle, after all checks, and then `items`."""
        keys, places = forms[::2], forms[1::2]
        kinds = [{*map(type, column)} for column in (keys, places, fqns, offsets, lengths)]
        if kinds != [{Key}, {StorageInfo}, {str}, {int}, {int}] or len(keys) != len(places):
            self._bad("storage_data, entries of one form differ in other fields too")
        parsed = [
            (self._ints(key.offset, "a chunk"), self._item("a chunk", place))
            for key, place in zip(keys, places, strict=True)
        ]
        marked = all(
            (key.fqn, *item[1:3]) == MARKS for key, (_, item) in zip(keys, parsed, strict=True)
        )
        if not marked or any(type(key.index) is not int for key in keys):
            self._bad("storage_data, entries of one form differ in other fields too")
        if {len(fqns), len(offsets), len(lengths)} != {len(forms_of)} or max(forms_of) >= len(
            parsed
        ):
            self._bad("storage_data, columns of different lengths")
        if min(min(offsets), min(lengths)) < 0 or max(map(add, offsets, lengths)) > MAX_NUMEL:
            self._bad("storage_data, a byte range below 0 or beyond 2**63")
        return ItemRows(
            [*parsed, *((at, item) for (_, at), item in items.items())],
            [*forms_of, *range(len(parsed), len(parsed) + len(items))],
            [*fqns, *(fqn for fqn, _ in items)],
            [*offsets, *(item.offset for item in items.values())],
            [*lengths, *(item.nbytes for item in items.values())],
        )

    def _whole(self, entries: Mapping[str, object], rows: ItemRows) -> Whole | None:
        """Return the tensors in columns; None unless every entry is a tensor of one whole chunk."""
        infos: dict[object, TensorInfo] = {}
        for entry in set(entries.values()):  # by identity: many tensors share one object
            if type(entry) is not Tensor:
                return None
            info, boxes = self._boxes("a tensor", entry)
            if [sizes for _, sizes in boxes] != [info.shape] or 0 in info.shape:
                return None
            if any(boxes[0][0]):
                return None
            infos[entry] = info
        return rows.whole(dict(zip(entries, map(infos.__getitem__, entries.values()), strict=True)))

    def _item(self, fqn: str, place: StorageInfo) -> Item:
        file, offset, nbytes = place.relative_path, place.offset, place.length
        if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
            self._bad(f"storage of {fqn!r}, expected a file and its range, found {_show(file)}")
        if offset < 0 or nbytes < 0 or offset + nbytes > MAX_NUMEL:
            self._bad(f"storage of {fqn!r}, impossible: {_show(nbytes)} bytes from {_show(offset)}")
        transforms = place.transform_descriptors
        if not transforms:
            return Item(file, offset, nbytes)
        return Item(file, offset, nbytes, tuple(map(str, self._list(transforms, "transforms"))))

    def _item_of(
        self, items: Mapping[tuple[str, Offsets | None], Item], key: str, offsets: Offsets | None
    ) -> Item:
        item = items.get((key, offsets))
        if item is None:
            place = "" if offsets is None else f" at {_show(offsets)}"
            self._bad(f"entry {key!r}{place} has no place in storage_data")
        return item

    def _tensor(
        self, key: str, entry: Tensor, items: Mapping[tuple[str, Offsets | None], Item]
    ) -> TensorEntry:
        known = self._cut.get(entry)  # by identity: many tensors may share one object
        if known is None:
            known = self._cut[entry] = self._boxes(key, entry)
        info, boxes = known
        try:
            chunks = tuple([(at, sizes, items[key, at]) for at, sizes in boxes])
        except KeyError:
            chunks = tuple([(at, sizes, self._item_of(items, key, at)) for at, sizes in boxes])
        return TensorEntry(info, chunks)

    def _boxes(self, key: str, entry: Tensor) -> tuple[TensorInfo, list[tuple[Offsets, Offsets]]]:
        info = self._info(key, entry.properties, entry.size)
        ndim = len(info.shape)
        boxes = []
        chunks = entry.chunks
        for chunk in chunks if type(chunks) is list else self._list(chunks, f"chunks of {key!r}"):
            if type(chunk) is not ChunkBox:
                self._bad(f"chunk of {key!r}, expected ChunkStorageMetadata, found {_show(chunk)}")
            offsets, sizes = self._ints(chunk.offsets, key), self._ints(chunk.sizes, key)
            if len(offsets) != ndim or len(sizes) != ndim:
                self._bad(f"chunk of {key!r}, not of {ndim} dims: {_show(offsets)}+{_show(sizes)}")
            boxes.append((offsets, sizes))
        return info, boxes

    def _info(self, key: str, properties: object, size: object) -> TensorInfo:
        shape = self._ints(size, key)
        dtype = properties.dtype if type(properties) is Properties else None
        name = dtype.name if type(dtype) is pickle_read.DType else None
        info = self._infos.get((name, *shape))
        if info is not None:
            return info
        if name is None or name not in ITEMSIZE:
            self._bad(f"tensor {key!r}: unknown dtype {_show(dtype)}")
        numel = 1
        for n in shape:
            numel *= n or 1
        if numel > MAX_NUMEL or len(shape) > MAX_DIMS:
            self._bad(f"tensor {key!r}: shape {_show(shape)} has too many dims or elements")
        return self._infos.setdefault((name, *shape), TensorInfo(shape, name))

    def _ints(self, value: object, key: str) -> tuple[int, ...]:
        """Return sizes or offsets as a plain tuple, since a Size would be written as a torch.Size again."""
        if type(value) is tuple:
            for n in value:
                if type(n) is not int or not 0 <= n <= MAX_NUMEL:
                    break
            else:
                return value
        if isinstance(value, tuple | list):
            for n in value:
                if type(n) is not int or not 0 <= n <= MAX_NUMEL:
                    break
            else:
                return tuple(value)
        self._bad(f"tensor {key!r}, expected sizes, found {_show(value)}")

    def _list(self, value: object, name: str) -> list[object] | tuple[object, ...]:
        if not isinstance(value, list | tuple):
            self._bad(f"{name}, expected a list, found {_show(value)}")
        return value

    def _paths(self, planner_data: object, entries: Mapping[str, object]) -> dict[str, Path]:
        """Return flat key -> path, for the keys that are not their own path of one segment.

        Megatron and torch's Hugging Face storage write None: then no key has another path. An integer
        in a path is an index of a list, because torch turns integer keys of dicts into strings. torch
        joins the segments with dots to the key (`_nested_dict.flatten_state_dict`): of a path that is
        another's, some readers would follow the key and some the path. It does so for all keys: one
        without a path would be taken for a tensor at the root.
        """
        if not ({*map(type, entries)} <= {str} and "".join(entries).isascii()):
            for key in entries:
                if not isinstance(key, str) or not _is_text(key):
                    self._bad(f"state_dict_metadata, expected names, found {_show(key)}")
        if planner_data is None:
            return {}
        if planner_data == dict(zip(entries, zip(entries, strict=True), strict=True)):
            return {}  # the usual case: every path has one segment, its key
        paths: dict[str, Path] = {}
        for key, path in self._dict(planner_data, "planner_data").items():
            if type(key) is not str:
                self._bad(f"planner_data, expected names, found {_show(key)}")
            if key not in entries:
                continue
            if not isinstance(path, tuple | list) or not path:
                self._bad(f"planner_data[{key!r}], expected a path, found {_show(path)}")
            for segment in path:
                if type(segment) is not int and not (type(segment) is str and _is_text(segment)):
                    self._bad(f"planner_data[{key!r}], expected text or int: {_show(segment)}")
            if ".".join(map(str, path)) != key:
                self._bad(
                    f"planner_data[{key!r}], expected a path of that key, found {_show(path)}"
                )
            paths[key] = tuple(ListIndex(s) if type(s) is int else s for s in path)
        missing = next((key for key in entries if key not in paths), None)
        if planner_data and missing is not None:
            self._bad(f"planner_data, expected a path of every key, found none of {missing!r}")
        return paths

    def _bad(self, problem: str) -> NoReturn:
        raise SourceError(
            "CKM109",
            f"{self.where}: bad DCP metadata: {problem}",
            "copy the file again, or save again; ckptmap reads what torch 1.13 to 2.13 writes",
        )


def _is_text(name: str) -> bool:
    """Return True for text without lone surrogates, which can be neither printed nor written."""
    return name.isascii() or not any(0xD800 <= ord(char) < 0xE000 for char in name)


def _show(value: object) -> str:
    """Return a short text of a value for an error. It never fails, whatever the pickle holds."""
    if isinstance(value, Opaque):
        return value.class_name[:80]
    if not isinstance(value, str | int | tuple | type(None)):
        return type(value).__name__
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        return type(value).__name__
