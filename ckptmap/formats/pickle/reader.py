"""A restricted unpickler: reads what a pickle says without importing or calling what it names.

It drives the C unpickler, whose every way to a global goes through `find_class`. There each name
becomes one of ours: a value (a dtype marker), a function of this module, or an inert stub class
whose instances record what they were given. A stub class is itself an `Opaque`, so a function or
class that a pickle merely refers to is inert as well.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias, cast

from ckptmap.core.gc_pause import paused_gc
from ckptmap.errors import SourceError
from ckptmap.formats.pickle.blocklist import Refused, refuse_dangerous
from ckptmap.formats.pickle.guard import check_opcodes
from ckptmap.formats.pickle.library_scalars import SCALARS, VERSION, number
from ckptmap.tensors import ITEMSIZE, Opaque, TensorInfo

MAX_NBYTES = 1 << 30
"""Largest pickle that is read: a hundred times the index of the largest model known."""

MAX_SIZE_DIMS = 64
"""torch's own limit on dimensions; a longer torch.Size is not one."""

_AHEAD = 1 << 14
"""Bytes that the C unpickler gets at once: it would ask a plain stream for every opcode."""
_FEW_NBYTES = 1 << 14
"""Below this the collector hardly runs, and pausing it costs more than it saves."""

Allowed: TypeAlias = Mapping[tuple[str, str], object]


@dataclass(frozen=True, slots=True)
class DType:
    """`torch.<name>`, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """`torch.device(text)`: `"cpu"`, `"cuda:0"`."""

    text: str


class Size(tuple[int, ...]):
    """A `torch.Size`: equal to the tuple, and written back as what it was."""

    __slots__ = ()


# ---------------------------------------------------------------------------------- inert names


class _Name(type, Opaque):
    """The type of stub classes: makes a class that is named but not called an Opaque as well."""

    def __repr__(cls) -> str:
        return f"<{cls.module}.{cls.name}>"


class Inert(Opaque, metaclass=_Name):
    """An object of a foreign class: keeps arguments, state and items, runs nothing.

    `items` are what a list or set subclass would have been extended by, and (key, value) pairs
    of a dict subclass.
    """

    items: list[Any]

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        self = object.__new__(cls)
        if args or kwargs:
            self.__dict__["args"] = (*args, kwargs) if kwargs else args
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Nothing: Opaque's own would take the arguments for fields."""

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state

    @classmethod
    def of(cls, named: Opaque, args: tuple[Any, ...], state: Any, info: TensorInfo | None) -> Inert:
        """An object of the class that `named` refers to."""
        self = stub(named.module, named.name)()
        self.__dict__.update(args=args, state=state, info=info)
        return self

    def extend(self, values: list[object]) -> None:
        self.__dict__.setdefault("items", []).extend(values)

    def add(self, value: Any) -> None:
        self.extend([value])

    def __setitem__(self, key: object, value: object) -> None:
        self.extend([(key, value)])


@lru_cache(maxsize=4096)
def stub(module: str, name: str) -> type[Inert]:
    """The inert class that stands for `module.name`; itself an Opaque, too."""
    made: Any = _Name("Inert", (Inert,), {"module": module, "name": name})
    return cast("type[Inert]", made)


def standing_for(module: str, name: str, function: Callable[..., object]) -> object:
    """A stub class for `module.name` whose call gives `function(*args)`; for `allow` tables.

    Never the bare function: a pickle could set its attributes, its defaults for one.
    """

    def __new__(cls: object, *args: object) -> object:
        return function(*args)

    return made_by(module, name, __new__)


def made_by(module: str, name: str, new: Callable[..., object]) -> object:
    """The same by `new(cls, *args)`: a call less, for what is called 100,000 times."""
    return _Name("Inert", (Inert,), {"module": module, "name": name, "__new__": new})


# ----------------------------------------------------------------------- what is really built


class _Allowance(threading.local):
    """Elements that one load may still copy: constructors called on a memoised list can copy it
    a million times for a few bytes of pickle each."""

    left = 0


_allowance = _Allowance()


def _spend(values: Any) -> Any:
    if type(values) not in (list, tuple, set, frozenset, dict, OrderedDict, str, bytes, bytearray):
        raise pickle.UnpicklingError(f"cannot be built from {type(values).__name__}")
    _allowance.left -= len(values)
    if _allowance.left < 0:
        raise pickle.UnpicklingError("copies far more than it holds")
    return values


class _StateDict(OrderedDict[object, object]):
    """An OrderedDict whose attributes a pickle cannot shadow: of its state only `_metadata` stays."""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and "_metadata" in state:
            self._metadata = state["_metadata"]


def _ordered_dict(cls: Any, items: Any = ()) -> OrderedDict[Any, Any]:
    return _StateDict(_spend(items)) if items else _StateDict()


def _size(values: object = ()) -> Size:
    if not isinstance(values, (list, tuple)) or len(values) > MAX_SIZE_DIMS:
        raise pickle.UnpicklingError("malformed torch.Size")
    return Size(values)


def _device(kind: str, index: int | None = None) -> Device:
    return Device(kind if index is None else f"{kind}:{index}")


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 spells bytes: text of code points below 256."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unknown encoding {str(encoding)[:40]!r} of bytes")
    return bytes(_spend(text).encode("latin-1"))


def _bytearray(*args: Any) -> bytearray:
    """Never `bytearray(n)`, which allocates what a pickle asks for."""
    if len(args) == 2:
        return bytearray(_encode(*args))
    return bytearray(_spend(args[0]) if args else b"")


def _scalar(module: str, name: str) -> Callable[..., object]:
    def made(*args: Any) -> Any:
        value = number(args)
        return stub(module, name)(*args) if value is None else value

    return made


def _version(text: object) -> str:
    if not isinstance(text, str):
        raise pickle.UnpicklingError("malformed TorchVersion")
    return text


def _getattr(owner: object, name: str) -> object:
    """How protocol 2 spells a nested class: the same stub under a longer name."""
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


def _new_object_ex(cls: Any, args: Any, kwargs: Any) -> Any:
    return _new_object(cls, *args, kwargs)


def _builtins() -> Iterator[tuple[str, Callable[..., Any]]]:
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


def _known() -> dict[tuple[str, str], Any]:
    functions: dict[tuple[str, str], Callable[..., Any]] = {
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
    known: dict[tuple[str, str], Any] = {
        key: standing_for(*key, function) for key, function in functions.items()
    }
    known["collections", "OrderedDict"] = made_by("collections", "OrderedDict", _ordered_dict)
    known.update({("torch", name): DType(name) for name in ITEMSIZE})
    return known


_KNOWN = _known()

# ------------------------------------------------------------------------------------- the load


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allow: Allowed, persistent_load: Any) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(data), _AHEAD), encoding="utf-8")
        self._allow = allow
        # A method would be a call more, for each of 100,000 tensors.
        self.persistent_load = persistent_load or _outside  # type: ignore[method-assign]

    def find_class(self, module: str, name: str) -> object:
        found = self._allow.get((module, name))
        if found is None:
            found = _KNOWN.get((module, name))
        if found is None:
            refuse_dangerous(module, name)
            found = stub(module, name)
        return found


def _outside(pid: object) -> NoReturn:
    raise pickle.UnpicklingError("refers to data outside itself")


_NOTHING: Allowed = {}


def load(
    data: bytes,
    where: str,
    *,
    allow: Allowed = _NOTHING,
    persistent_load: Callable[[object], object] | None = None,
    of_nbytes: int = 0,
) -> object:
    """The value that a pickle holds, foreign objects as `Opaque`. `where` names it in errors.

    `allow` maps (module, name) to what stands for it: a class or a value. A pickle may set the
    state of all that it names: a class must not let it, and functions go in by `standing_for`.
    `of_nbytes` is the size of the whole where `data` is put together of its parts.
    Raises SourceError CKM106 where the pickle is malformed, too large, or names something that
    only an attack calls; nothing that it names is ever imported or called.
    """
    if len(data) > MAX_NBYTES:
        _malformed(where, f"holds {len(data)} bytes, expected at most {MAX_NBYTES}")
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
            "this is how malicious checkpoints attack; get the weights from a source you trust",
        ) from None
    except Exception as error:  # the C unpickler raises nearly every type on malformed input
        kind = "" if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: "
        _malformed(where, f"{kind}{str(error)[:200]}")


def _malformed(where: str, what: str) -> NoReturn:
    raise SourceError(
        "CKM106",
        f"{where}: malformed pickle: {what}",
        "the file is damaged or was not written by torch.save; get a fresh copy",
    ) from None
