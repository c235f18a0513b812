"""`.metadata` of a DCP directory: a pickle of torch's `Metadata`, as plain records.

    Metadata{state_dict_metadata: {flat key: TensorStorageMetadata{properties, size, chunks}
                                            | BytesStorageMetadata},
             planner_data: {flat key: path tuple},
             storage_data: {MetadataIndex{fqn, offset}: _StorageInfo{relative_path, offset, length}}}

(torch/distributed/checkpoint/metadata.py and filesystem.py, torch 1.13 to 2.13.) torch itself
reads it with a plain `pickle.load`; here nothing that it names is imported or called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from ckptmap.errors import SourceError
from ckptmap.leaves import ListIndex
from ckptmap.tensors import ITEMSIZE, Opaque, Path, TensorInfo
from ckptmap.wire import pickle_read
from ckptmap.wire.gc_pause import paused_gc

MAX_DIMS = 64
MAX_NUMEL = 2**63 - 1
Offsets = tuple[int, ...]


class Item(NamedTuple):
    """Where one entry's bytes lie: `nbytes` from `offset` of a file of the directory."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """Names of what the bytes went through, outermost last: `stream.zstd/1`."""


class TensorEntry(NamedTuple):
    """A tensor: its info, and (offsets, sizes, item) of each chunk."""

    info: TensorInfo
    chunks: tuple[tuple[Offsets, Offsets, Item], ...]


@dataclass(frozen=True)
class Metadata:
    """`tensors` and `values` by flat key; `paths` says where each flat key sits."""

    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Item] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)

    def path(self, key: str) -> Path:
        """Never found by splitting the key: names hold dots. Without a path the key is one."""
        return self.paths.get(key, (key,))


# ------------------------------------------------------------------------ what pickles build


class _Sealed(type):
    """Types of our stand-ins: a pickle can set attributes of a class that it names, if let."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__}.{name} cannot be set")


class _Record(metaclass=_Sealed):
    """Takes what we want of its state into slots: there are five a tensor, and a dict in each
    would be 100 MB of 100,000 tensors. Hashed by identity, which makes them quick to use as keys.
    What was never set is None."""

    __slots__ = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        names: tuple[str, ...] = self.__slots__
        for name in names:
            setattr(self, name, state.get(name))

    def __getattr__(self, name: str) -> Any:
        return None


class _Root(_Record):
    __slots__ = ("planner_data", "state_dict_metadata", "storage_data")


class _Tensor(_Record):
    __slots__ = ("chunks", "properties", "size")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.chunks, self.size = state.get("chunks"), state.get("size")
        self.properties = state.get("properties")


class _Bytes(_Record):
    __slots__ = ()


class _Chunk(_Record):
    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.offsets, self.sizes = state.get("offsets"), state.get("sizes")


class _Key(_Record):
    __slots__ = ("fqn", "offset")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fqn, self.offset = state.get("fqn"), state.get("offset")


class _Place(_Record):
    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.relative_path, self.offset = state.get("relative_path"), state.get("offset")
        self.length = state.get("length")
        self.transform_descriptors = state.get("transform_descriptors")


class _Properties(_Record):
    __slots__ = ("dtype",)

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) and state else None


MODULE = "torch.distributed.checkpoint.metadata"
_ALLOW: Mapping[tuple[str, str], Any] = {
    # Five to a tensor, so no Python function: `() + x` gives a tuple back, uncopied, and refuses
    # anything else.
    ("torch", "Size"): ().__add__,
    (MODULE, "Metadata"): _Root,
    (MODULE, "TensorStorageMetadata"): _Tensor,
    (MODULE, "BytesStorageMetadata"): _Bytes,
    (MODULE, "ChunkStorageMetadata"): _Chunk,
    (MODULE, "MetadataIndex"): _Key,
    (MODULE, "TensorProperties"): _Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
}


def read_metadata(data: bytes, where: str) -> Metadata:
    """The records of a `.metadata` file. `where` names it in errors.

    Raises SourceError CKM106 for a pickle that is malformed or names what only an attack calls,
    CKM109 for one that is of another class or does not hold together.
    """
    with paused_gc():
        root = pickle_read.load(data, where, allow=_ALLOW)
        if type(root) is not _Root:
            raise _other_root(root, where)
        return _Reader(where).metadata(root)


def _other_root(root: Any, where: str) -> SourceError:
    found = root.class_name if isinstance(root, Opaque) else type(root).__name__
    hint = "expected torch.distributed.checkpoint.metadata.Metadata"
    if found.startswith("bytecheckpoint."):
        hint = "ByteCheckpoint is another format; merge it with its own merge_bcp first"
    return SourceError("CKM109", f"{where}: is a {found}, not DCP metadata", hint)


class _Reader:
    """Checks on the way from what the pickle said to records."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._infos: dict[tuple[Any, ...], TensorInfo] = {}

    def metadata(self, root: _Root) -> Metadata:
        entries = self._dict(root.state_dict_metadata, "state_dict_metadata")
        items = self._items(self._dict(root.storage_data, "storage_data"))
        tensors: dict[str, TensorEntry] = {}
        values: dict[str, Item] = {}
        for key, entry in entries.items():
            if type(entry) is _Tensor:
                tensors[key] = self._tensor(key, entry, items)
            elif type(entry) is _Bytes:
                values[key] = self._item_of(items, key, None)
            else:
                self._bad(f"entry {key!r}, expected a tensor's or a value's, found {_what(entry)}")
        return Metadata(tensors, values, self._paths(root.planner_data, entries))

    def _dict(self, value: Any, name: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            self._bad(f"{name}, expected a dict, found {_what(value)}")
        return value

    def _items(self, storage: dict[Any, Any]) -> dict[tuple[str, Offsets | None], Item]:
        items: dict[tuple[str, Offsets | None], Item] = {}
        for key, place in storage.items():
            if type(key) is not _Key or type(place) is not _Place:
                self._bad(f"storage_data, found {_what(key)}: {_what(place)}")
            fqn, offsets = key.fqn, key.offset
            if type(fqn) is not str:
                self._bad(f"storage_data, malformed MetadataIndex of {_what(fqn)}")
            index = (fqn, None if offsets is None else self._ints(offsets, fqn))
            if index in items:
                self._bad(f"storage_data, {fqn!r} at {_what(index[1])} is there twice")
            items[index] = self._item(fqn, place)
        return items

    def _item(self, fqn: str, place: _Place) -> Item:
        file, offset, nbytes = place.relative_path, place.offset, place.length
        if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
            self._bad(f"storage of {fqn!r}, malformed _StorageInfo: {_what(file)}")
        if offset < 0 or nbytes < 0 or offset + nbytes > MAX_NUMEL:
            self._bad(f"storage of {fqn!r}, impossible range {_what(offset)}+{_what(nbytes)}")
        transforms = place.transform_descriptors
        if not transforms:
            return Item(file, offset, nbytes)
        return Item(file, offset, nbytes, tuple(map(str, self._list(transforms, "transforms"))))

    def _item_of(
        self, items: Mapping[tuple[str, Offsets | None], Item], key: str, offsets: Offsets | None
    ) -> Item:
        item = items.get((key, offsets))
        if item is None:
            place = "" if offsets is None else f" at {_what(offsets)}"
            self._bad(f"entry {key!r}{place} has no place in storage_data")
        return item

    def _tensor(
        self, key: str, entry: _Tensor, items: Mapping[tuple[str, Offsets | None], Item]
    ) -> TensorEntry:
        info = self._info(key, entry.properties, entry.size)
        ndim = len(info.shape)
        chunks = []
        found = entry.chunks
        for chunk in found if type(found) is list else self._list(found, f"chunks of {key!r}"):
            if type(chunk) is not _Chunk:
                self._bad(f"chunk of {key!r}, found {_what(chunk)}")
            offsets, sizes = self._ints(chunk.offsets, key), self._ints(chunk.sizes, key)
            if len(offsets) != ndim or len(sizes) != ndim:
                self._bad(f"chunk of {key!r}: {_what(offsets)}+{_what(sizes)} in {info}")
            chunks.append((offsets, sizes, self._item_of(items, key, offsets)))
        return TensorEntry(info, tuple(chunks))

    def _info(self, key: str, properties: Any, size: Any) -> TensorInfo:
        shape = self._ints(size, key)
        dtype = properties.dtype if type(properties) is _Properties else None
        name = dtype.name if type(dtype) is pickle_read.DType else None
        info = self._infos.get((name, *shape))
        if info is not None:
            return info
        if name is None or name not in ITEMSIZE:
            self._bad(f"tensor {key!r}: unknown dtype {_what(dtype)}")
        numel = 1
        for n in shape:
            numel *= n or 1
        if numel > MAX_NUMEL or len(shape) > MAX_DIMS:
            self._bad(f"tensor {key!r}: impossible shape {_what(shape)}")
        return self._infos.setdefault((name, *shape), TensorInfo(shape, name))

    def _ints(self, value: Any, key: str) -> tuple[int, ...]:
        """A plain tuple: a Size compares equal but is written back as a Size."""
        if type(value) is tuple:
            for n in value:
                if type(n) is not int or n < 0:
                    break
            else:
                return value
        if isinstance(value, tuple | list):
            for n in value:
                if type(n) is not int or n < 0:
                    break
            else:
                return tuple(value)
        self._bad(f"tensor {key!r}, expected sizes, found {_what(value)}")

    def _list(self, value: Any, name: str) -> list[Any] | tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            self._bad(f"{name}, expected a list, found {_what(value)}")
        return value

    def _paths(self, planner_data: Any, entries: Mapping[str, Any]) -> dict[str, Path]:
        """None (Megatron, HF storage) leaves every key a path of one segment. An integer counts in
        a list: torch makes integer keys of dicts strings."""
        for key in entries:
            if not isinstance(key, str) or not _is_text(key):
                self._bad(f"state_dict_metadata, expected names, found {_what(key)}")
        if planner_data is None:
            return {}
        paths: dict[str, Path] = {}
        for key, path in self._dict(planner_data, "planner_data").items():
            if key not in entries:
                continue
            if type(path) is tuple and len(path) == 1 and path[0] == key:
                paths[key] = path
                continue  # as nearly all are: one segment, checked above
            if not isinstance(path, tuple | list) or not path:
                self._bad(f"planner_data[{key!r}], expected a path, found {_what(path)}")
            for segment in path:
                if type(segment) is not int and not (type(segment) is str and _is_text(segment)):
                    self._bad(f"planner_data[{key!r}], a segment is {_what(segment)}")
            paths[key] = tuple(ListIndex(s) if type(s) is int else s for s in path)
        self._check_distinct(paths)
        return paths

    def _check_distinct(self, paths: Mapping[str, Path]) -> None:
        if len(set(paths.values())) == len(paths):
            return
        home: dict[Path, str] = {}
        for key, path in paths.items():
            other = home.setdefault(path, key)
            if other != key:
                self._bad(f"planner_data, {other!r} and {key!r} have one path {_what(path)}")

    def _bad(self, what: str) -> NoReturn:
        raise SourceError(
            "CKM109",
            f"{self.where}: bad DCP metadata: {what}",
            "the save is damaged, or of a torch that ckptmap does not know",
        )


def _is_text(name: str) -> bool:
    """No lone surrogates: those can be neither printed nor written."""
    return name.isascii() or not any(0xD800 <= ord(char) < 0xE000 for char in name)


def _what(value: object) -> str:
    """A short name or text of a value; never fails, whatever a pickle made it."""
    if isinstance(value, Opaque):
        return value.class_name[:80]
    if not isinstance(value, str | int | tuple | type(None)):
        return type(value).__name__
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        return type(value).__name__
