"""Values that a pickle makes by the name of a class or function, which is never called here; `writer` writes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function: `Global("torch.serialization", "_get_layout")`."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The call `function(*args)`, which the reader of the pickle makes."""

    function: Global
    args: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Instance:
    """An object that the reader makes with `cls.__new__(*args)` and `state` (None: no state)."""

    cls: Global | Call
    state: object = None
    args: tuple[object, ...] = ()
