"""Read torch.save zip files, whole or as an item inside another file, from their headers only.

Layout: all members stored, in one root folder: `data.pkl` (protocol 2), `byteorder`, `data/<key>`
one a storage, `version`, and `.format_version`, `.storage_alignment`, `.data/serialization_id`
since torch 2.7. Written by torch/serialization.py `_save` through miniz: data starts are aligned
by padding in the local header's extra field, sizes are in the central directory only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pickle import UnpicklingError
from typing import Any

from ckptmap.errors import SourceError
from ckptmap.files import Files
from ckptmap.tensors import ITEMSIZE, Box, Chunk, Opaque, Region, StoredTensor, TensorInfo
from ckptmap.wire.pickle_read import DType, Inert, standing_for, stub
from ckptmap.wire.pickle_read import load as load_pickle
from ckptmap.wire.pickle_write import STORAGE_CLASS
from ckptmap.wire.zip_read import Record, Records, bad, read_records

__all__ = ["Loaded", "Record", "Records", "StorageRef", "load", "read_records"]

LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The pickled magic number that torch.save's format of before 1.6 starts with."""

MAX_EXPANSION = 1024
MAX_EXPANDED_NBYTES = 64 << 20
"""A view whose elements overlap may be larger than its storage by this factor, or up to this
size: a broadcast mask is honest, 40 GB out of 16 bytes is an attack."""

_STORAGE_DTYPE = {name: dtype for dtype, name in STORAGE_CLASS.items()} | {
    "UntypedStorage": "uint8",
    "ComplexHalfStorage": "complex32",
}


@dataclass(frozen=True)
class Loaded:
    """What a torch.save file holds: `tree` as saved, tensors as `StoredTensor`."""

    tree: Any
    byteorder: str
    records: Records
    pickle_nbytes: int


class StorageRef(Inert):
    """A storage that a tensor views; alone in a tree it is an Opaque that nothing can use."""

    module = "torch"
    name = "TypedStorage"
    source: _Storages
    key: str
    dtype: str
    nbytes: int


class _ReadTensor(StoredTensor):
    """A tensor whose fields the pickle that holds it cannot set."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise UnpicklingError("sets the state of a tensor that is already built")


def load(files: Files, file: str, base: int = 0, nbytes: int | None = None) -> Loaded:
    """Everything a torch.save zip holds: `nbytes` of `file` from `base` on, default: all of it.

    Each tensor is a StoredTensor of one chunk whose region is absolute in `file`. Raises
    SourceError: CKM104 truncated, CKM105 malformed zip, CKM106 malformed or unsafe pickle,
    CKM117 a file of before torch 1.6.
    """
    try:
        records = read_records(files, file, base, nbytes)
    except SourceError as error:
        raise _legacy(files, file, base) or error from None
    for name, what in (("constants.pkl", "a TorchScript archive"), ("data.pkl", "")):
        if (name in records) == bool(what):
            raise bad(file, f"is {what or 'a zip without data.pkl'}, not a torch.save file")
    byteorder = "little"
    if "byteorder" in records:
        byteorder = records.read("byteorder", limit=64).decode("latin-1")
    if byteorder != "little":
        raise SourceError(
            "CKM101",
            f"{file}: holds {byteorder[:20]}-endian tensors, expected little",
            "load and torch.save it once on a little-endian machine",
        )
    data = records.read("data.pkl", check=True)
    tree = load_pickle(
        data, f"{file}: data.pkl", allow=_ALLOW, persistent_load=_Storages(records).find
    )
    return Loaded(tree, byteorder, records, len(data))


@dataclass(frozen=True, slots=True)
class _Grid:
    """Sizes and strides, checked once for the many tensors that share them.

    `reach` counts elements from the first to past the last; `steps` are the strides in bytes.
    """

    info: TensorInfo
    steps: tuple[int, ...]
    reach: int

    @classmethod
    def make(cls, dtype: str, size: Any, stride: Any) -> _Grid:
        if len(size) != len(stride) or not {*map(type, (*size, *stride))} <= {int}:
            raise UnpicklingError(f"malformed sizes {size!r:.60} or strides {stride!r:.60}")
        if min((*size, *stride), default=0) < 0:
            raise UnpicklingError(f"negative size or stride in {size!r:.60}, {stride!r:.60}")
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        steps = tuple([s * ITEMSIZE[dtype] for s in stride])
        return cls(TensorInfo(tuple(size), dtype), steps, 0 if 0 in size else reach)


def _legacy(files: Files, file: str, base: int) -> SourceError | None:
    """What to say of a file in the format of before torch 1.6; None: it is not."""
    with files.descriptor(file) as fd:
        if os.pread(fd, len(LEGACY_MAGIC), base) != LEGACY_MAGIC:
            return None
    return SourceError(
        "CKM117",
        f"{file}: is in the torch.save format of before torch 1.6",
        "load it once and torch.save it with a current torch",
    )


class _Storages:
    """Finds the record of each storage that the pickle refers to."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._grids: dict[tuple[Any, ...], _Grid] = {}

    def find(self, pid: Any) -> StorageRef:
        """`("storage", class, key, location, numel)`: numel in elements of the class's dtype."""
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise UnpicklingError(f"unknown persistent id {pid!r:.80}")
        _, cls, key, _, numel = pid
        if not (isinstance(cls, Opaque) and isinstance(key, str) and type(numel) is int):
            raise UnpicklingError("malformed persistent id of a storage")
        nbytes = self.records.nbytes(f"data/{key}")
        dtype = _STORAGE_DTYPE.get(cls.name, "")
        if dtype and numel * ITEMSIZE[dtype] != nbytes:
            raise UnpicklingError(
                f"storage {key!r} is {numel} x {dtype}, its record holds {nbytes} bytes"
            )
        found = StorageRef()
        found.__dict__.update(source=self, key=key, dtype=dtype, nbytes=nbytes)
        return found

    def grid(self, dtype: str, size: Any, stride: Any) -> _Grid:
        known = self._grids.get((dtype, size, stride))
        if known is None:
            known = self._grids[dtype, size, stride] = _Grid.make(dtype, size, stride)
        return known


# --------------------------------------------------------------------------------- tensors


def _rebuild_v2(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Any:
    """`torch._utils._rebuild_tensor_v2`; `metadata` would be a conjugate or negative bit."""
    dtype = storage.dtype if isinstance(storage, StorageRef) else ""
    if not dtype or metadata:
        return stub("torch._utils", "_rebuild_tensor_v2")(storage, offset, size, stride, metadata)
    return _view(storage, dtype, offset, size, stride)


def _rebuild_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    dtype: Any = None,
    metadata: Any = None,
) -> Any:
    """`torch._utils._rebuild_tensor_v3`: of dtype `dtype` over an untyped storage."""
    if not isinstance(storage, StorageRef) or not isinstance(dtype, DType) or metadata:
        return stub("torch._utils", "_rebuild_tensor_v3")(storage, offset, size, stride, dtype)
    return _view(storage, dtype.name, offset, size, stride)


def _view(storage: StorageRef, dtype: str, offset: Any, size: Any, stride: Any) -> StoredTensor:
    """The tensor that is `size`, `stride`, `offset` (elements) of a storage, checked to lie in it."""
    grid = storage.source.grid(dtype, size, stride)
    info, steps, itemsize = grid.info, grid.steps, ITEMSIZE[dtype]
    if type(offset) is not int or offset < 0:
        raise UnpicklingError(f"{info} at offset {offset!r:.20} of storage {storage.key!r}")
    if grid.reach:
        end = (offset + grid.reach) * itemsize
        if end > storage.nbytes:
            raise UnpicklingError(
                f"{info} reaches byte {end} of storage {storage.key!r}, which holds {storage.nbytes}"
            )
        if info.nbytes > max(MAX_EXPANDED_NBYTES, storage.nbytes * MAX_EXPANSION):
            raise UnpicklingError(
                f"{info} expands the {storage.nbytes} bytes of storage {storage.key!r} to "
                f"{info.nbytes}"
            )
    records, key = storage.source.records, storage.key
    return _ReadTensor(
        info,
        partial(_chunks, records, key, offset * itemsize, grid),
        share=(records.file, records.base, key, offset, info.shape, steps),
    )


def _chunks(records: Records, key: str, start: int, grid: _Grid) -> Sequence[Chunk]:
    """The one chunk; its data start is found only now, by a read of the local header."""
    record, info = records[f"data/{key}"], grid.info
    region = Region(record.file, record.offset + start, info.shape, grid.steps, info.itemsize)
    covers = region.nbytes == record.nbytes and region.is_contiguous
    return (Chunk(Box.whole(info.shape), region, record.crc32 if covers else None),)


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    """A Parameter is its tensor; what Python attributes it has are no part of a checkpoint."""
    return data


_PLAIN_TENSORS = frozenset(
    {("torch", "Tensor"), ("torch._tensor", "Tensor"), ("torch.nn.parameter", "Parameter")}
    | {("torch.nn", "Parameter"), ("torch.nn.parameter", "Buffer"), ("torch.nn", "Buffer")}
)


def _rebuild_from_type(function: Any, cls: Any, args: Any, state: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a subclass, or a tensor with Python attributes."""
    if not (isinstance(cls, type) and isinstance(function, type) and isinstance(args, tuple)):
        raise UnpicklingError("malformed tensor subclass")
    assert isinstance(cls, Opaque), "every class that the unpickler gives is one"
    inner = function(*args)
    if (cls.module, cls.name) in _PLAIN_TENSORS:
        return inner
    if isinstance(inner, Opaque) and (inner.module, inner.name) == (cls.module, cls.name):
        return Inert.of(cls, inner.args, _merged(state), inner.info)
    info = inner.info if isinstance(inner, StoredTensor | Opaque) else None
    return Inert.of(cls, (inner,), _merged(state), info)


def _merged(state: Any) -> Any:
    """(attributes, slots) -> one dict, as `torch._utils._set_obj_state` sets both."""
    if isinstance(state, tuple) and len(state) == 2:
        first, second = (part if part is not None else {} for part in state)
        if isinstance(first, dict) and isinstance(second, dict):
            return {**first, **second}
    return state


def _rebuild_wrapper_subclass(
    cls: Any, dtype: Any, size: Any, stride: Any, offset: Any = 0, *rest: Any
) -> Opaque:
    """`torch._utils._rebuild_wrapper_subclass`: outer shape and dtype; the data come as state."""
    if not isinstance(cls, Opaque) or any(type(n) is not int or n < 0 for n in size):
        raise UnpicklingError("malformed wrapper subclass")
    info = TensorInfo(tuple(size), dtype.name) if isinstance(dtype, DType) else None
    return Inert.of(cls, (dtype, tuple(size), stride, offset, *rest), None, info)


_ALLOW = {
    key: standing_for(*key, function)
    for key, function in (
        (("torch._utils", "_rebuild_tensor_v2"), _rebuild_v2),
        (("torch._utils", "_rebuild_tensor_v3"), _rebuild_v3),
        (("torch._utils", "_rebuild_parameter"), _rebuild_parameter),
        (("torch._utils", "_rebuild_parameter_with_state"), _rebuild_parameter),
        (("torch._utils", "_rebuild_wrapper_subclass"), _rebuild_wrapper_subclass),
        (("torch._tensor", "_rebuild_from_type_v2"), _rebuild_from_type),
    )
}
