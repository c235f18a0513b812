"""Write pickles of protocol 2 that `torch.load(weights_only=True)` and DCP read, without torch.

The opcodes are those of Lib/pickletools.py. The same value gives the same bytes. Strings, globals and the constant parts of tensors are written
once and then referred to. Containers are not, so a container that holds itself is refused.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptmap.core.formatting import some
from ckptmap.core.printable import advised
from ckptmap.formats.pickle.named_values import Call, Global, Instance
from ckptmap.formats.pickle.reader import Device, DType, Size
from ckptmap.tensors import ITEMSIZE

# torch's legacy typed storage classes. A tensor of any other dtype is written with UntypedStorage
# (uint8) and `_rebuild_tensor_v3`, as torch._utils and torch.storage do.
STORAGE_CLASS: Mapping[str, str] = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}

MAX_INT_BITS = 255 * 8 - 1  # `torch.load` has no opcode for longer ones
OPTIMIZER = "--optimizer drop"
MAX_DEPTH = 200
"""Nesting depth of containers: far above any state dict, below Python's own recursion limit."""


class StorageTensor(NamedTuple):
    """A tensor as torch.save writes it: a view of the storage `data/<key>`.

    `numel` is the length of the storage. `numel`, `offset_elems` and `stride` count elements.
    """

    key: str
    dtype: str
    numel: int
    offset_elems: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False


class Numbered(NamedTuple):
    """A tensor that is equal to `like` in all but its storage `key`. Thousands of tensors share one
    `like`."""

    key: str
    like: StorageTensor


class Unwritable(TypeError):
    """Values that cannot be written: the text of the path of each, and why not."""

    def __init__(self, refusals: Sequence[tuple[str, str]]) -> None:
        (path, why), *others = refusals
        more = f"; neither can {some([path for path, _ in others])}" if others else ""
        super().__init__(f"{path}: {why}{more}")
        self.refusals = refusals

    @property
    def hint(self) -> str:
        """The options that leave all of them behind. `--drop` takes keys of the source, so the prefix "extra"
        is removed, under which a plan keeps values other than weights and optimizer state."""
        options = list(dict.fromkeys(_option(path) for path, _ in self.refusals))
        if options == [OPTIMIZER]:
            return f"leave the optimizer behind with {OPTIMIZER}"
        return f"leave {'them' if len(options) > 1 else 'it'} behind with {' '.join(options)}"


def _option(path: str) -> str:
    role, _, below = path.partition(".")
    if role == "optimizer":
        return OPTIMIZER
    return advised(drop=below.partition(".")[0] if role == "extra" else role)


def dump(value: object, *, name: str = "") -> bytes:
    """Return the pickle of a value. It may hold None, bool, int, float, complex, str, bytes, bytearray,
    list, tuple, set, frozenset, dict, OrderedDict, and the classes `StorageTensor`, `Numbered`,
    `DType`, `Device`, `Size`, `Global`, `Call`, `Instance`.

    Raise Unwritable with all other values. Its text begins with the path of the first, below `name`."""
    emitter = _Emitter()
    emitter.emit(value, (name,) if name else ())
    if emitter.refusals:
        raise Unwritable(emitter.refusals)
    emitter.out += b"."
    return bytes(emitter.out)


def _path_text(path: tuple[object, ...]) -> str:
    return ".".join(str(part) for part in path) or "the root"


class _Emitter:
    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.refusals: list[tuple[str, str]] = []
        """The path and the reason of each value that cannot be written; one error names them all."""
        self._add = self.out.extend
        self._memo: dict[object, int] = {}
        self._alike: dict[tuple[object, ...], tuple[bytes, bytes]] = {}
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._handlers: dict[type, Callable[[Any, tuple[object, ...]], None]] = {
            StorageTensor: self._tensor,
            Numbered: self._numbered,
            dict: self._dict,
            OrderedDict: self._ordered_dict,
            list: self._list,
            tuple: self._tuple,
            Size: self._size,
            set: self._set,
            frozenset: self._set,
            bytearray: self._bytearray,
            Call: lambda v, path: self._call(v.function, v.args, path),
            Instance: self._instance,
        }

    def emit(self, value: Any, path: tuple[object, ...]) -> None:
        """Append the opcodes of a value. `path` names it in errors."""
        kind = type(value)
        atom = _ATOMS.get(kind)
        if atom is not None:
            if kind is int and value.bit_length() > MAX_INT_BITS:
                self.refusals.append((_path_text(path), "so long an integer cannot be written"))
            else:
                self._add(atom(value))
        elif kind is str:
            self._str(value)
        elif kind is Global:
            self._global(value.module, value.name)
        elif kind is DType:
            self._global("torch", value.name)
        elif kind is Device:
            self._device(value)
        elif kind is bytes:
            self._bytes(value)
        else:
            self._composite(kind, value, path)

    def _composite(self, kind: type, value: object, path: tuple[object, ...]) -> None:
        is_ordered = isinstance(value, OrderedDict)
        handler = self._handlers.get(kind, self._ordered_dict if is_ordered else None)
        if handler is None:
            said = " ".join(f"{value!r:.200} cannot be written".split())
            self.refusals.append((_path_text(path), said))
        elif len(path) > MAX_DEPTH:
            said = f"nested deeper than {MAX_DEPTH} containers"
            self.refusals.append((f"{_path_text(path[:8])}...", said))
        else:
            handler(value, path)

    def _memoised(self, key: object) -> bool:
        """Emit a reference to the object written under `key`. Return False if there is none yet."""
        known = self._memo.get(key)
        if known is None:
            return False
        self._add(_get(known))
        return True

    def _remember(self, key: object) -> None:
        index = self._memo[key] = len(self._memo)
        self._add(_put(index))

    def _str(self, text: str) -> None:
        if not self._memoised(text):
            self._add(_str_op(text))
            self._remember(text)

    def _global(self, module: str, name: str) -> None:
        key = (module, name)
        if not self._memoised(key):
            self._add(f"c{module}\n{name}\n".encode())
            self._remember(key)

    # ----------------------------------------------------------------- calls

    def _call(self, function: Global, args: tuple[object, ...], path: tuple[object, ...]) -> None:
        self._global(function.module, function.name)
        self._tuple(args, path)
        self._add(b"R")

    def _device(self, device: Device) -> None:
        kind, _, index = device.text.partition(":")
        self._call(Global("torch", "device"), (kind, int(index)) if index else (kind,), ())

    def _bytes(self, data: bytes) -> None:
        """Emit a call that encodes text of the same code points: protocol 2 has no opcode for bytes."""
        if data:
            self._call(Global("_codecs", "encode"), (data.decode("latin-1"), "latin1"), ())
        else:
            self._call(Global("__builtin__", "bytes"), (), ())

    def _bytearray(self, data: bytearray, path: tuple[object, ...]) -> None:
        self._call(Global("__builtin__", "bytearray"), (bytes(data),), path)

    def _size(self, size: Size, path: tuple[object, ...]) -> None:
        self._call(Global("torch", "Size"), (tuple(size),), path)

    def _set(self, values: Iterable[object], path: tuple[object, ...]) -> None:
        """Emit a set as a sorted list, so that the same set gives the same bytes."""
        name = type(values).__name__
        ordered = sorted(values, key=lambda value: (type(value).__name__, repr(value)))
        self._call(Global("__builtin__", name), (ordered,), path)

    def _instance(self, value: Instance, path: tuple[object, ...]) -> None:
        """Emit an `Instance` once, then references to it: many tensors share one mesh."""
        if self._memoised(("instance", id(value))):
            return
        self.emit(value.cls, path)
        self._tuple(value.args, path)
        self._add(b"\x81")
        if value.state is not None:
            self.emit(value.state, path)
            self._add(b"b")
        self._remember(("instance", id(value)))

    # ----------------------------------------------------------------- containers

    def _tuple(self, values: tuple[object, ...], path: tuple[object, ...]) -> None:
        if len(values) > 3:
            self._add(b"(")
        for index, value in enumerate(values):
            self.emit(value, (*path, index))
        self._add(_TUPLES[len(values)] if len(values) < 4 else b"t")

    def _list(self, values: list[object], path: tuple[object, ...]) -> None:
        self._add(b"]")
        if values:
            self._add(b"(")
            for index, value in enumerate(values):
                self.emit(value, (*path, index))
            self._add(b"e")

    def _dict(self, values: Mapping[object, object], path: tuple[object, ...]) -> None:
        self._add(b"}")
        self._items(values, path)

    def _ordered_dict(self, values: OrderedDict[object, object], path: tuple[object, ...]) -> None:
        self._global("collections", "OrderedDict")
        self._add(b")R")
        self._items(values, path)
        metadata = getattr(values, "_metadata", None)
        if metadata is not None:
            self._dict({"_metadata": metadata}, path)
            self._add(b"b")

    def _items(self, values: Mapping[object, object], path: tuple[object, ...]) -> None:
        if values:
            self._add(b"(")
            for key, value in values.items():
                if type(value) is Numbered and self._entry(key, value):
                    continue
                if type(key) is str:
                    self._str(key)
                else:
                    self.emit(key, (*path, "a key"))
                self.emit(value, (*path, key))
            self._add(b"u")

    def _entry(self, key: object, tensor: Numbered) -> bool:
        """Emit a dict key and its tensor at once: there may be 100,000. Return False if the tensor is
        the first of its kind, or if the key is no new string."""
        number, like = tensor
        around = self._around.get(id(like))
        if around is None or type(key) is not str or key in self._memo:
            return False
        index = self._memo[key] = len(self._memo)
        self._add(b"".join((_str_op(key), _put(index), around[0], _str_op(number), around[1])))
        return True

    # ----------------------------------------------------------------- tensors

    def _tensor(self, tensor: StorageTensor, path: tuple[object, ...]) -> None:
        """Emit `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)`. A tensor that
        differs from an earlier one in its storage only is a copy of its bytes with another key."""
        alike = self._alike.get(tensor[1:])
        if alike is None:
            self._first(tensor)
        else:
            self._add(alike[0] + _str_op(tensor.key) + alike[1])

    def _numbered(self, tensor: Numbered, path: tuple[object, ...]) -> None:
        """Emit a tensor, and let `_entry` emit the next ones that share its `like`."""
        self._tensor(tensor.like._replace(key=tensor.key), path)
        self._around[id(tensor.like)] = self._alike[tensor.like[1:]]

    def _first(self, tensor: StorageTensor) -> None:
        """Emit a tensor. Keep the bytes before and after its key for the tensors that are alike."""
        self._parts(tensor)
        start = len(self.out)
        key_at = self._parts(tensor)  # again: now all but the key are references to the memo
        again, length = bytes(self.out[start:]), len(_str_op(tensor.key))
        del self.out[start:]
        self._alike[tensor[1:]] = again[: key_at - start], again[key_at - start + length :]

    def _parts(self, tensor: StorageTensor) -> int:
        """Emit all parts of a tensor. Return the offset at which the storage's key begins."""
        typed = tensor.dtype in STORAGE_CLASS
        self._global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self._add(b"(")
        key_at = self._persistent_storage(tensor)
        self._add(int_op(tensor.offset_elems))
        self._add(int_tuple(tensor.shape))
        self._add(int_tuple(tensor.stride))
        self._add(b"\x88" if tensor.requires_grad else b"\x89")
        self._global("collections", "OrderedDict")
        self._add(b")R")
        if not typed:
            self._global("torch", tensor.dtype)
        self._add(b"tR")
        return key_at

    def _persistent_storage(self, tensor: StorageTensor) -> int:
        """Emit `('storage', torch.FloatStorage, '0', 'cpu', numel)`; an untyped storage counts bytes.
        Return the offset at which its key begins."""
        legacy = STORAGE_CLASS.get(tensor.dtype)
        self._add(b"(")
        self._str("storage")
        if legacy is not None:
            self._global("torch", legacy)
            numel = tensor.numel
        else:
            self._global("torch.storage", "UntypedStorage")
            numel = tensor.numel * ITEMSIZE[tensor.dtype]
        key_at = len(self.out)
        self._add(_str_op(tensor.key))
        self._str("cpu")
        self._add(int_op(numel) + b"tQ")
        return key_at


_TUPLES = (b")", b"\x85", b"\x86", b"\x87")


_INDEX = struct.Struct("<I")


def _put(index: int) -> bytes:
    return b"q" + bytes((index,)) if index < 256 else b"r" + _INDEX.pack(index)


def _get(index: int) -> bytes:
    return b"h" + bytes((index,)) if index < 256 else b"j" + _INDEX.pack(index)


def _str_op(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + _INDEX.pack(len(data)) + data


def int_op(value: int) -> bytes:
    """Return the shortest opcode of protocol 2 that pushes an integer."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def int_tuple(values: tuple[int, ...]) -> bytes:
    """Return the opcodes that push a tuple of integers."""
    ops = b"".join(map(int_op, values))
    return ops + _TUPLES[len(values)] if len(values) < 4 else b"(" + ops + b"t"


def _float_op(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def _complex_op(value: complex) -> bytes:
    real, imag = _float_op(value.real), _float_op(value.imag)
    return b"c__builtin__\ncomplex\n" + real + imag + b"\x86R"


_ATOMS: Mapping[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: int_op,
    float: _float_op,
    complex: _complex_op,
}
