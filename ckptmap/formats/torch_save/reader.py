"""Read the zip archives that torch.save writes, whole files or inside another file, without torch and
without reading the tensors' data.

Layout of the zip, all members uncompressed and in one root folder:

    data.pkl       the pickle (protocol 2); a tensor in it refers to a storage by key
    data/<key>     the bytes of one storage
    byteorder      "little" or "big"
    version        and, since torch 2.7: .format_version .storage_alignment .data/serialization_id

Padding in the extra field of a local header aligns the start of the data. Sizes are in the central
directory only. Source: torch/serialization.py `_save`, which writes through miniz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

from ckptmap.errors import SourceError
from ckptmap.formats.pickle.reader import DType, Inert, calling_stub, constructing_stub, stub
from ckptmap.formats.pickle.reader import load as load_pickle
from ckptmap.formats.pickle.writer import STORAGE_CLASS
from ckptmap.formats.torch_save.foreign_archives import before_zip, other_zip
from ckptmap.formats.torch_save.grid import MAX_NUMEL, Grid, exceeds
from ckptmap.formats.zip.directory import bad
from ckptmap.formats.zip.reader import Records, read_records
from ckptmap.storage.files import Files
from ckptmap.tensors import (
    ITEMSIZE,
    Box,
    Chunk,
    Extent,
    Opaque,
    Places,
    Region,
    StoredTensor,
    TensorInfo,
)

MAX_EXPANSION = 1024
MAX_EXPANDED_NBYTES = 64 << 20
"""Limits for a view whose elements overlap: it may be larger than its storage by this factor, or up
to this many bytes. A broadcast mask is usual, but 40 GB out of 16 bytes is an attack."""

_STORAGE_DTYPE = {name: dtype for dtype, name in STORAGE_CLASS.items()} | {
    "UntypedStorage": "uint8",
    "ComplexHalfStorage": "complex32",
}


@dataclass(frozen=True)
class Loaded:
    """The content of a torch.save file: `tree` is the saved value, with a `StoredTensor` per tensor."""

    tree: Any
    records: Records
    pickle_nbytes: int


class StorageRef(Inert):
    """The storage that a tensor views. A storage that is saved without a tensor stays an Opaque."""

    module = "torch"
    name = "TypedStorage"
    record: tuple[_Storages, str, str, int]
    """The storages of the file, and the key, dtype and nbytes of this one."""


class ReadTensor(StoredTensor):
    """A tensor that looks up its place in the file when asked, because that takes a read of a local
    header. A pickle cannot set its fields."""

    __slots__ = ("grid", "key", "records", "start")

    def __init__(self, records: Records, key: str, start: int, grid: Grid) -> None:
        self.records, self.key, self.start, self.grid = records, key, start, grid
        self.info, self.replicas = grid.info, ()
        self._place: Any = None
        self._search = None

    @property
    def place(self) -> Places:
        """Return where the tensor lies in the file. The first use reads a local header."""
        place: Places | None = self._place
        if place is None:
            place = self._place = _find(self.records, self.key, self.start, self.grid)
        return place

    def of(self, records: Records) -> ReadTensor:
        """Return the same view of the same storage in another file with members of equal sizes."""
        return ReadTensor(records, self.key, self.start, self.grid)

    @property
    def share(self) -> object:
        """Return a value that is equal for tied tensors: those of the same bytes, shape and strides."""
        records, grid = self.records, self.grid
        return (records.file, records.base, self.key, self.start, grid.info.shape, grid.steps)

    def __setstate__(self, state: object) -> None:
        raise UnpicklingError("sets the state of a tensor that is already built")


def load(files: Files, file: str, base: int = 0, nbytes: int | None = None) -> Loaded:
    """Return the content of a torch.save zip: `nbytes` bytes of `file` from `base` on, default all.

    Each tensor is a StoredTensor of one chunk, whose region counts bytes from the start of `file`.
    Raise SourceError CKM101 for big-endian tensors, CKM104 for a truncated file, CKM105 for a
    malformed zip, CKM106 for a malformed or unsafe pickle, CKM117 for a file older than torch 1.6.
    """
    records, data = open_zip(files, file, base, nbytes)
    return Loaded(parse(records, data), records, len(data))


def open_zip(
    files: Files, file: str, base: int = 0, nbytes: int | None = None
) -> tuple[Records, bytes]:
    """Return the members of a torch.save zip, and its pickle. Raise SourceError as `load` does."""
    try:
        records = read_records(files, file, base, nbytes)
    except SourceError as error:
        raise before_zip(files, file, base) or other_zip(file, base) or error from None
    if "data.pkl" not in records or "constants.pkl" in records:
        raise other_zip(file, base) or bad(file, "is a zip without data.pkl, not a torch.save file")
    byteorder = "little"
    if "byteorder" in records:
        byteorder = records.read("byteorder", limit=64).decode("latin-1")
    if byteorder != "little":
        raise SourceError(
            "CKM101",
            f"{file}: holds {byteorder[:20]}-endian tensors, expected little",
            "load and torch.save it once on a little-endian machine",
        )
    return records, records.read("data.pkl", check=True)


def parse(
    records: Records,
    data: bytes,
    also: Callable[[object], object] | None = None,
    of_nbytes: int = 0,
) -> object:
    """Return the value of the pickle in a torch.save zip.

    also        resolves the persistent ids that do not name storages; None: there are none
    of_nbytes   as for `pickle.reader.load`
    """
    find = _Storages(records).find

    def resolve(pid: object) -> object:
        resolved = also(pid) if also is not None else None
        return find(pid) if resolved is None else resolved

    return load_pickle(
        data,
        f"{records.file}: data.pkl",
        allow=_ALLOW,
        persistent_load=find if also is None else resolve,
        of_nbytes=of_nbytes,
    )


class _Storages:
    """Finds the record of each storage that the pickle refers to."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.grids: dict[tuple[object, ...], Grid] = {}
        self._classes: dict[object, tuple[str, int]] = {}  # class -> dtype, bytes of an element

    def find(self, pid: Any) -> StorageRef:
        """Return the storage of a persistent id `("storage", class, key, location, numel)`. `numel`
        counts elements of the class's dtype. The first of a class goes through all checks."""
        try:
            kind, cls, key, _, numel = pid
            dtype, itemsize = self._classes[cls]
            nbytes = self.records.nbytes("data/" + key)
        except (TypeError, ValueError, KeyError):
            return self._look(pid)
        if type(pid) is not tuple or kind != "storage" or type(numel) is not int:
            return self._look(pid)
        if numel * itemsize != nbytes:
            return self._look(pid)
        storage = object.__new__(StorageRef)
        storage.__dict__["record"] = (self, key, dtype, nbytes)
        return storage

    def _look(self, pid: object) -> StorageRef:
        """Return the storage after all checks. Raise UnpicklingError for a malformed persistent id.

        litgpt's `incremental_save` numbers storages with integers, which torch.load takes, too.
        """
        if not (type(pid) is tuple and len(pid) == 5 and pid[0] == "storage"):
            raise UnpicklingError(f"unknown persistent id {pid!r:.80}")
        _, cls, key, _, numel = pid
        if type(key) is int and 0 <= key < MAX_NUMEL:
            key = str(key)
        if not (isinstance(cls, Opaque) and isinstance(key, str) and type(numel) is int):
            raise UnpicklingError("malformed persistent id of a storage")
        nbytes = self.records.nbytes(f"data/{key}")
        dtype = _STORAGE_DTYPE.get(cls.name, "")
        if dtype and numel * ITEMSIZE[dtype] != nbytes:
            raise UnpicklingError(
                f"storage {key!r} is {numel} x {dtype}, its record holds {nbytes} bytes"
            )
        if dtype:
            self._classes[cls] = dtype, ITEMSIZE[dtype]
        storage = object.__new__(StorageRef)
        storage.__dict__["record"] = (self, key, dtype, nbytes)
        return storage

    def grid(self, dtype: str, size: object, stride: object) -> Grid:
        """Return the checked sizes and strides of a view, the same object for equal ones."""
        known = self.grids.get((dtype, size, stride))
        if known is None:
            known = self.grids[dtype, size, stride] = Grid.make(dtype, size, stride)
        return known


# --------------------------------------------------------------------------------- tensors


def _rebuild_v2(
    cls: object,
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    metadata: object = None,
) -> object:
    """Return the tensor of a `torch._utils._rebuild_tensor_v2`. With `metadata` (a conjugate or
    negative bit) it is an Opaque."""
    if type(storage) is StorageRef and type(offset) is int and not offset and metadata is None:
        source, key, dtype, nbytes = storage.record
        grid = source.grids.get((dtype, size, stride))
        if grid is not None and grid.end <= nbytes >= grid.nbytes:
            return ReadTensor(source.records, key, 0, grid)  # a whole storage, as nearly all are
    if not isinstance(storage, StorageRef) or not storage.record[2] or metadata:
        return stub("torch._utils", "_rebuild_tensor_v2")(storage, offset, size, stride, metadata)
    return _view(storage, storage.record[2], offset, size, stride)


def _rebuild_v3(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    dtype: object = None,
    metadata: object = None,
) -> object:
    """Return the tensor of a `torch._utils._rebuild_tensor_v3`: `dtype` over an untyped storage."""
    if not isinstance(storage, StorageRef) or not isinstance(dtype, DType) or metadata:
        named = stub("torch._utils", "_rebuild_tensor_v3")
        return named(storage, offset, size, stride, dtype, metadata)
    return _view(storage, dtype.name, offset, size, stride)


def _view(
    storage: StorageRef, dtype: str, offset: object, size: object, stride: object
) -> StoredTensor:
    """Return the view of a storage; `offset` and `stride` count elements. Raise UnpicklingError if it
    does not lie in the storage, or expands it far."""
    source, key, _, nbytes = storage.record
    grid = source.grid(dtype, size, stride)
    itemsize = ITEMSIZE[dtype]
    if type(offset) is not int or not 0 <= offset <= MAX_NUMEL:
        raise UnpicklingError(
            f"{grid.info} at offset {offset!r:.20} of storage {key!r}, expected an integer >= 0"
        )
    if grid.reach:
        end = (offset + grid.reach) * itemsize
        if end > nbytes:
            raise UnpicklingError(
                f"{grid.info} reaches byte {end} of storage {key!r}, which holds {nbytes}"
            )
        if grid.nbytes > MAX_EXPANDED_NBYTES and grid.nbytes > nbytes * MAX_EXPANSION:
            raise UnpicklingError(
                f"{grid.info} expands the {nbytes} bytes of storage {key!r} to {grid.nbytes}"
            )
    return ReadTensor(source.records, key, offset * itemsize, grid)


def _find(records: Records, key: str, start: int, grid: Grid) -> Places:
    """Return the extent of a contiguous tensor in the file, or the one chunk of any other."""
    offset, nbytes, crc32 = records.locate(f"data/{key}")
    if grid.is_contiguous:
        return Extent(records.file, offset + start, crc32 if grid.nbytes == nbytes else None)
    info = grid.info
    region = Region(records.file, offset + start, info.shape, grid.steps, info.itemsize)
    return (Chunk(Box.whole(info.shape), region),)


def _rebuild_parameter(data: object, *rest: object) -> object:
    """Return the tensor of a Parameter without its Python attributes.

    A Parameter with a `quant_state` of bitsandbytes becomes an Opaque: the tensor holds quantized
    codes, which mean nothing without the scales in that attribute.
    """
    state = _merged(rest[-1]) if rest else None
    if isinstance(state, dict) and isinstance(state.get("quant_state"), Opaque):
        return Inert.of(Opaque("bitsandbytes.nn.modules", "Params4bit"), (data,), state, None)
    return data


_PLAIN_TENSORS = frozenset(
    {("torch", "Tensor"), ("torch._tensor", "Tensor"), ("torch.nn.parameter", "Parameter")}
    | {("torch.nn", "Parameter"), ("torch.nn.parameter", "Buffer"), ("torch.nn", "Buffer")}
)

_ARRIVING = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
"""The class that `DTensor.full_tensor` may return while its communication still runs. `elem` is the
tensor; `completed` tells if the program waited for it before it saved."""


def _rebuild_from_type(function: object, cls: object, args: object, state: object) -> object:
    """Return the value of a `torch._tensor._rebuild_from_type_v2`: a plain tensor for one with Python
    attributes, an Opaque for a tensor subclass."""
    if not (isinstance(cls, type) and isinstance(function, type) and isinstance(args, tuple)):
        raise UnpicklingError("malformed tensor subclass")
    assert isinstance(cls, Opaque), "every class that the unpickler gives is one"
    inner = function(*args)
    if (cls.module, cls.name) in _PLAIN_TENSORS:
        return inner
    state = _merged(state)
    attributes = state if isinstance(state, dict) else {}
    elem = attributes.get("elem")
    if (cls.module, cls.name) == _ARRIVING and isinstance(elem, ReadTensor):
        elem.records.unwaited += attributes.get("completed") is not True
        return elem
    if isinstance(inner, Opaque) and (inner.module, inner.name) == (cls.module, cls.name):
        return Inert.of(cls, inner.args, state, inner.info)
    info = inner.info if isinstance(inner, StoredTensor | Opaque) else None
    return Inert.of(cls, (inner,), state, info)


def _merged(state: object) -> object:
    """Return one dict for a state (attributes, slots), since `torch._utils._set_obj_state` sets both.
    Return any other state as it is."""
    if isinstance(state, tuple) and len(state) == 2:
        first, second = (part if part is not None else {} for part in state)
        if isinstance(first, dict) and isinstance(second, dict):
            return {**first, **second}
    return state


def _rebuild_wrapper_subclass(
    cls: object, dtype: object, size: Any, stride: object, offset: object = 0, *rest: object
) -> Opaque:
    """Return the Opaque of a `torch._utils._rebuild_wrapper_subclass`: its outer shape and dtype. The
    pickle gives its inner tensors later, as state."""
    bad_size = any(type(n) is not int or n < 0 for n in size) or exceeds(size)
    if not isinstance(cls, Opaque) or bad_size:
        raise UnpicklingError("malformed wrapper subclass")
    info = TensorInfo(tuple(size), dtype.name) if isinstance(dtype, DType) else None
    return Inert.of(cls, (dtype, tuple(size), stride, offset, *rest), None, info)


_ALLOW = {
    key: calling_stub(*key, function)
    for key, function in (
        (("torch._utils", "_rebuild_tensor_v3"), _rebuild_v3),
        (("torch._utils", "_rebuild_parameter"), _rebuild_parameter),
        (("torch._utils", "_rebuild_parameter_with_state"), _rebuild_parameter),
        (("torch._utils", "_rebuild_wrapper_subclass"), _rebuild_wrapper_subclass),
        (("torch._tensor", "_rebuild_from_type_v2"), _rebuild_from_type),
    )
}
_ALLOW["torch._utils", "_rebuild_tensor_v2"] = constructing_stub(
    "torch._utils", "_rebuild_tensor_v2", _rebuild_v2
)
