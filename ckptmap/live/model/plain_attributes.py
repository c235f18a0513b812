"""Numbers in attributes of modules, which no state dict has.

    self.width = 64       an argument of the constructor, the same in every run
    self.calls += 1       moved by training: a resumed run begins with the constructor's

So a run goes on bit for bit only if the live modules have the numbers that they had when it was saved. They are told by
class: a number that all modules of a class have, or how many have one and a digest of all; and a digest of the names of
these modules, because on other stages of a pipeline, or without one, a rank has other modules, whose numbers say nothing.
Modules with extra state are left out, which take back what they need, and private attributes and flags: libraries keep
there what they find again, and what a caller switches after `load`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted, some
from ckptmap.live.model import module_walk
from ckptmap.mapping.wrappers import plain_path

if TYPE_CHECKING:
    import torch

NAMES = "names of modules"
KEY = "module_numbers"
"""Setting that has the numbers by class and attribute, as texts."""


def described(model: torch.nn.Module) -> dict[str, dict[str, str]]:
    """Return class -> attribute -> its number in all modules of the class, or how many differ; NAMES -> a digest of
    the names of these modules. Classes without numbers are left out."""
    return {cls: told for cls, told in _by_class(model).items() if len(told) > 1}


def _by_class(model: torch.nn.Module) -> dict[str, dict[str, str]]:
    modules: dict[str, dict[str, Mapping[str, object]]] = {}
    name_of: dict[type[torch.nn.Module], str] = {}
    for path, module in module_walk.named_modules(model):
        kind = type(module)
        if kind not in name_of:
            name_of[kind] = _class_name(kind)
        if name := name_of[kind]:
            modules.setdefault(name, {})[plain_path(path)] = vars(module)
    return {cls: _of_class(cls, of_class) for cls, of_class in modules.items()}


def _of_class(cls: str, modules: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return the numbers of the modules of one class, whose attributes are given by name."""
    names, found = sorted(modules), dict[str, list[str]]()
    for path in names:
        for name, value in modules[path].items():
            if (type(value) is int or type(value) is float) and (
                name in found or _is_told(cls, name, value)
            ):
                found.setdefault(name, []).append(repr(value))
    return {NAMES: _digest(names), **{name: _told(values) for name, values in found.items()}}


def _class_name(kind: type[torch.nn.Module]) -> str:
    """Return the name of the class whose numbers are told; "" for a class with extra state, and for one whose modules
    only hold others. `fully_shard` derives a class from the module's own; FSDP1's wrapper has none but nn.Module."""
    from torch import nn

    if kind.set_extra_state is not nn.Module.set_extra_state:
        return ""
    mro = (cls for cls in kind.__mro__ if issubclass(cls, nn.Module))
    own = next(cls for cls in mro if not cls.__module__.startswith("torch.distributed."))
    place = own.__module__
    if own is nn.Module or place.startswith(("torch.nn.parallel.", "ckptmap.")):
        return ""
    if place.startswith("torch.") and not place.startswith("torch.nn."):
        return ""
    return own.__qualname__


def _is_told(cls: str, name: str, value: object) -> bool:
    """Return whether a number of this name is told. Rates of dropout are, by `dropout.described`."""
    is_rate = type(value) is float and "drop" in f"{cls}.{name}".lower()
    return not (name.startswith("_") or is_rate)


def _told(values: Sequence[str]) -> str:
    if values.count(values[0]) == len(values):
        return values[0]
    return f"{_digest(values)} of {len(values)} modules"


def _digest(values: Sequence[str]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def changed(saved: object, model: torch.nn.Module) -> Iterator[str]:
    """Yield the attributes that had other numbers when the run was saved, of the classes of which the model has the
    same modules."""
    was, live = saved if isinstance(saved, Mapping) else {}, _by_class(model)
    texts = [
        f"{cls}.{name}: was {old}, is {live[cls].get(name, 'not there')}"
        for cls, attributes in was.items()
        if cls in live and isinstance(attributes, Mapping)
        if attributes.get(NAMES) == live[cls][NAMES]
        for name, old in attributes.items()
        if live[cls].get(name) != old
    ]
    if texts:
        yield (
            f"{counted(len(texts), 'attribute')} of modules not as when it was saved: {some(texts)} (save them by"
            " get_extra_state and set_extra_state, or set them before load)"
        )
