"""Numbers in attributes of modules, which no state dict has.

    self.width = 64       an argument of the constructor, the same in every run
    self.calls += 1       moved by training: a resumed run begins with the constructor's

So a run goes on bit for bit only if the live modules have the numbers that they had when it was saved. They are told by
class: a number that all modules of a class have, or how many have one and a digest of all. Modules with extra state are
left out, which take back what they need, and private attributes and flags: libraries keep there what they find
again, and what a caller switches after `load`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted, some
from ckptmap.live.model import module_walk

if TYPE_CHECKING:
    import torch

KEY = "module_numbers"
"""Setting that has the numbers by class and attribute, as texts."""


def described(model: torch.nn.Module) -> dict[str, dict[str, str]]:
    """Return class -> attribute -> its number in all modules of the class, or how many differ."""
    from torch import nn

    found: dict[str, dict[str, list[str]]] = {}
    for module in module_walk.modules(model):
        cls = type(module)
        if _is_wrapper(cls) or cls.set_extra_state is not nn.Module.set_extra_state:
            continue
        for name, value in vars(module).items():
            if (type(value) is int or type(value) is float) and _is_told(cls, name, value):
                of_class = found.setdefault(cls.__qualname__, {})
                of_class.setdefault(name, []).append(repr(value))
    return {
        cls: {name: _told(values) for name, values in of_class.items()}
        for cls, of_class in found.items()
    }


def _is_wrapper(cls: type) -> bool:
    return cls.__module__.startswith("torch.") and not cls.__module__.startswith("torch.nn.")


def _is_told(cls: type, name: str, value: float) -> bool:
    """Return whether a number of this name is told. Rates of dropout are, by `dropout.described`."""
    is_rate = type(value) is float and "drop" in f"{cls.__name__}.{name}".lower()
    return not (name.startswith("_") or is_rate)


def _told(values: Sequence[str]) -> str:
    if values.count(values[0]) == len(values):
        return values[0]
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
    return f"{digest} of {len(values)} modules"


def changed(saved: object, model: torch.nn.Module) -> Iterator[str]:
    """Yield the attributes that had other numbers when the run was saved, of the classes that the model has."""
    was, live = saved if isinstance(saved, Mapping) else {}, described(model)
    known = {type(module).__qualname__ for module in module_walk.modules(model)}
    texts = [
        f"{cls}.{name}: was {old}, is {live.get(cls, {}).get(name, 'not there')}"
        for cls, attributes in was.items()
        if cls in known and isinstance(attributes, Mapping)
        for name, old in attributes.items()
        if live.get(cls, {}).get(name) != old
    ]
    if texts:
        yield (
            f"{counted(len(texts), 'attribute')} of modules not as when it was saved: {some(texts)} (save them by"
            " get_extra_state and set_extra_state, or set them before load)"
        )
