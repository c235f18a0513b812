"""Read a pickle without importing or calling anything that it names.

A pickle names classes and functions, and Python's unpickler imports and calls them. This module runs
the C unpickler, which asks `find_class` for every name. `find_class` returns an object of ckptmap
instead: a value (as `DType` for torch.float32), a class that calls a function of this module, or an
inert stub class, whose instances record the arguments and the state that the pickle gives them. A
stub class is itself an `Opaque`, so a class that a pickle names without calling it is inert too.

Source: pickletools and Lib/pickle.py of CPython; torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

from ckptmap.core.formatting import human
from ckptmap.core.gc_pause import paused_gc
from ckptmap.errors import SourceError
from ckptmap.formats.pickle.blocklist import Refused, refuse_dangerous
from ckptmap.formats.pickle.guard import check_opcodes
from ckptmap.formats.pickle.library_scalars import SCALARS, VERSION, number
from ckptmap.tensors import ITEMSIZE, Opaque, TensorInfo

MAX_NBYTES = 1 << 30
"""Bytes of the largest pickle that is read: a hundred times those of the largest known model."""

MAX_SIZE_DIMS = 64
"""Number of dims that torch allows; a longer torch.Size is malformed."""

_AHEAD = 1 << 14
"""Bytes that the C unpickler reads ahead. Without a buffer it would call `read` for every opcode."""
_FEW_NBYTES = 1 << 14
"""Bytes of a pickle below which pausing the garbage collector costs more than it saves."""

Allowed: TypeAlias = Mapping[tuple[str, str], object]


@dataclass(frozen=True, slots=True)
class DType:
    """The dtype `torch.<name>`."""

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True, slots=True)
class Device:
    """`torch.device(text)`: `"cpu"`, `"cuda:0"`."""

    text: str

    def __repr__(self) -> str:
        return f"device({self.text!r})"


class Size(tuple[int, ...]):
    """A `torch.Size`. It is equal to the tuple, and the writer pickles it as a torch.Size again."""

    __slots__ = ()


# ---------------------------------------------------------------------------------- inert names


class _Name(type, Opaque):
    """The metaclass of stub classes. Through it, a class that is named but not called is an Opaque."""

    def __repr__(cls) -> str:
        return f"<{cls.module}.{cls.name}>"


class Inert(Opaque, metaclass=_Name):
    """An object of a foreign class. It records its arguments, state and items, and runs nothing.

    `items` are the items that the pickle adds to a list or set, and the (key, value) pairs that it
    adds to a dict.
    """

    items: list[object]

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        self = object.__new__(cls)
        if args or kwargs:
            self.__dict__["args"] = (*args, kwargs) if kwargs else args
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Do nothing. `Opaque.__init__` would take the arguments for its fields."""

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state

    @classmethod
    def of(
        cls, named: Opaque, args: tuple[object, ...], state: object, info: TensorInfo | None
    ) -> Inert:
        """Return an object of the class that `named` refers to."""
        self = stub(named.module, named.name)()
        self.__dict__.update(args=args, state=state, info=info)
        return self

    def extend(self, values: list[object]) -> None:
        """Record items that the pickle appends to a list."""
        self.__dict__.setdefault("items", []).extend(values)

    def add(self, value: object) -> None:
        """Record an item that the pickle adds to a set."""
        self.extend([value])

    def __setitem__(self, key: object, value: object) -> None:
        self.extend([(key, value)])


@lru_cache(maxsize=4096)
def stub(module: str, name: str) -> type[Inert]:
    """Return the inert class that stands for `module.name`. The class is itself an Opaque."""
    return cast("type[Inert]", _Name("Inert", (Inert,), {"module": module, "name": name}))


def calling_stub(module: str, name: str, function: Callable[..., object]) -> object:
    """Return a stub class for `module.name` whose call returns `function(*args)`.

    A table for `load(allow=...)` must hold such classes and no bare functions: a pickle could set the
    attributes of a function, such as its defaults.
    """

    def __new__(cls: object, *args: object) -> object:
        return function(*args)

    return constructing_stub(module, name, __new__)


def constructing_stub(module: str, name: str, new: Callable[..., object]) -> object:
    """Return a stub class for `module.name` whose call returns `new(cls, *args)`. It saves one call
    per object, for functions that a pickle calls 100,000 times."""
    return _Name("Inert", (Inert,), {"module": module, "name": name, "__new__": new})


# ----------------------------------------------------------------------- values that are built


class _Allowance(threading.local):
    """The number of elements that a load may still copy. Without a limit, a pickle could copy one
    list a million times, for a few bytes of opcodes each."""

    left = 0


_allowance = _Allowance()
_Sized = TypeVar("_Sized", bound=Sized)


def _spend(values: _Sized) -> _Sized:
    if type(values) not in (list, tuple, set, frozenset, dict, OrderedDict, str, bytes, bytearray):
        raise pickle.UnpicklingError(f"cannot be built from {type(values).__name__}")
    _allowance.left -= len(values)
    if _allowance.left < 0:
        raise pickle.UnpicklingError("copies far more items than the pickle holds")
    return values


class _StateDict(OrderedDict[object, object]):
    """An OrderedDict that takes only `_metadata` from the state of a pickle, so that the pickle cannot
    replace its methods."""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and "_metadata" in state:
            self._metadata = state["_metadata"]


def _ordered_dict(cls: object, items: Sequence[tuple[object, object]] = ()) -> _StateDict:
    return _StateDict(_spend(items)) if items else _StateDict()


def _size(values: object = ()) -> Size:
    if not isinstance(values, (list, tuple)) or len(values) > MAX_SIZE_DIMS:
        raise pickle.UnpicklingError("malformed torch.Size")
    return Size(values)


def _device(kind: str, index: int | None = None) -> Device:
    return Device(kind if index is None else f"{kind}:{index}")


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Return the bytes that pickle protocol 2 writes as text of code points below 256."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unknown encoding {str(encoding)[:40]!r} of bytes")
    return bytes(_spend(text).encode("latin-1"))


def _bytearray(*args: Any) -> bytearray:
    """Return a bytearray of a container's items, or of encoded text. `bytearray(n)` is refused: it
    would allocate any size that a pickle states."""
    if len(args) == 2:
        return bytearray(_encode(*args))
    return bytearray(_spend(args[0]) if args else b"")


def _scalar(module: str, name: str) -> Callable[..., object]:
    def build(*args: object) -> object:
        value = number(args)
        return stub(module, name)(*args) if value is None else value

    return build


def _version(text: object) -> str:
    if not isinstance(text, str):
        raise pickle.UnpicklingError("malformed TorchVersion")
    return text


def _getattr(owner: object, name: str) -> object:
    """Return the stub class for a nested class, which pickle protocol 2 writes as a getattr."""
    if not isinstance(owner, Opaque) or not isinstance(name, str):
        raise pickle.UnpicklingError(f"getattr of {type(owner).__name__}")
    refuse_dangerous(owner.module, f"{owner.name}.{name}")
    return stub(owner.module, f"{owner.name}.{name}")


def _reconstructor(cls: object, base: object = None, state: object = None) -> object:
    return _new_object(cls, state) if state is not None else _new_object(cls)


def _new_object(cls: object, *args: object) -> object:
    if not isinstance(cls, _Name):
        raise pickle.UnpicklingError(f"makes an object of {type(cls).__name__}")
    return cls(*args)


def _new_object_ex(cls: object, args: Iterable[object], kwargs: object) -> object:
    return _new_object(cls, *args, kwargs)


def _builtins() -> Iterator[tuple[str, Callable[..., object]]]:
    yield "set", lambda values=(): set(_spend(values))
    yield "frozenset", lambda values=(): frozenset(_spend(values))
    yield "list", lambda values=(): list(_spend(values))
    yield "tuple", lambda values=(): tuple(_spend(values))
    yield "dict", lambda values=(): dict(_spend(values))
    yield "bytearray", _bytearray
    yield "bytes", lambda *args: bytes(_bytearray(*args))
    yield "complex", complex
    yield "slice", slice
    yield "range", range
    yield "xrange", range
    yield "getattr", _getattr


def _known() -> dict[tuple[str, str], object]:
    functions: dict[tuple[str, str], Callable[..., object]] = {
        ("collections", "defaultdict"): lambda factory=None, items=(): dict(_spend(items)),
        ("collections", "Counter"): lambda items=(): dict(_spend(items)),
        ("torch", "Size"): _size,
        ("torch", "device"): _device,
        ("_codecs", "encode"): _encode,
        VERSION: _version,
    }
    functions.update({key: _scalar(*key) for key in SCALARS})
    for module in ("builtins", "__builtin__"):
        functions.update({(module, name): function for name, function in _builtins()})
    for module in ("copyreg", "copy_reg"):
        functions[module, "_reconstructor"] = _reconstructor
        functions[module, "__newobj__"] = _new_object
        functions[module, "__newobj_ex__"] = _new_object_ex
    known: dict[tuple[str, str], object] = {
        key: calling_stub(*key, function) for key, function in functions.items()
    }
    known["collections", "OrderedDict"] = constructing_stub(
        "collections", "OrderedDict", _ordered_dict
    )
    known.update({("torch", name): DType(name) for name in ITEMSIZE})
    return known


_KNOWN = _known()

# ------------------------------------------------------------------------------------- the load


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, allow: Allowed, persistent_load: Callable[[object], object] | None
    ) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(data), _AHEAD), encoding="utf-8")
        self._allow = allow
        # An attribute, because a method would cost one more call for each of 100,000 tensors.
        self.persistent_load = persistent_load or _outside  # type: ignore[method-assign]

    def find_class(self, module: str, name: str) -> object:
        """Return the object that stands for `module.name`. Raise Refused for a name on the blocklist."""
        stand_in = self._allow.get((module, name))
        if stand_in is None:
            stand_in = _KNOWN.get((module, name))
        if stand_in is None:
            refuse_dangerous(module, name)
            stand_in = stub(module, name)
        return stand_in


def _outside(pid: object) -> NoReturn:
    raise pickle.UnpicklingError("refers to data outside the pickle, by a persistent id")


_NOTHING: Allowed = {}


def load(
    data: bytes,
    where: str,
    *,
    allow: Allowed = _NOTHING,
    persistent_load: Callable[[object], object] | None = None,
    of_nbytes: int = 0,
) -> object:
    """Return the value of a pickle, with an `Opaque` for each foreign object.

    where        name of the pickle in errors
    allow        (module, name) -> the class or value that stands for it. A pickle may set the state
                 of each object that it names, so a class here must refuse that, and a function must
                 be wrapped by `calling_stub`
    of_nbytes    size of the whole pickle, if `data` consists of parts of it

    Raise SourceError CKM106 if the pickle is malformed, larger than MAX_NBYTES, or names something
    on the list of attacks. Nothing that a pickle names is imported or called.
    """
    if len(data) > MAX_NBYTES:
        _malformed(where, f"holds {human(len(data))}, expected at most {human(MAX_NBYTES)}")
    _allowance.left = 16 * len(data) + 1_000_000
    try:
        check_opcodes(data, of_nbytes)
        if len(data) < _FEW_NBYTES:
            return _Unpickler(data, allow, persistent_load).load()
        with paused_gc():
            return _Unpickler(data, allow, persistent_load).load()
    except SourceError:
        raise
    except Refused as error:
        raise SourceError(
            "CKM106",
            f"{where}: pickle names {error} (refused; nothing was run)",
            "malicious checkpoints attack in this way; get the weights from a source that you trust",
        ) from None
    except Exception as error:  # the C unpickler raises nearly every type on malformed input
        kind = "" if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: "
        _malformed(where, f"{kind}{str(error)[:200]}")


def _malformed(where: str, problem: str) -> NoReturn:
    raise SourceError(
        "CKM106",
        f"{where}: malformed pickle: {problem}",
        "the file is damaged, or another program than torch.save wrote it; copy it again",
    ) from None
