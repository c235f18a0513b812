"""Several models in one checkpoint: each is named, and its name is the first segment of its FQNs. Parts of one model,
as a rank of a pipeline with interleaved stages has, keep their FQNs.

{"policy": m, "value": v}  ->  policy.layers.0.weight, value.layers.0.weight
[part0, part2]             ->  layers.0.weight, layers.2.weight

They become one module for the length of a call. It has no forward, and the models do not notice it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from ckptmap.core import argument_checks
from ckptmap.errors import ArgumentError, LoadError
from ckptmap.mapping.wrappers import SEGMENTS, strip_wrappers

if TYPE_CHECKING:
    import torch

Models: TypeAlias = "torch.nn.Module | Mapping[str, torch.nn.Module] | Sequence[torch.nn.Module]"
"""A model, several by name, or the parts of one."""

KEY = "models"
"""Key of the names among the settings of a run."""
_MARK = "_ckptmap_models"
"""Attribute of the one module: the names of its models."""
_PARTS = "_ckptmap_parts"
"""Attribute of the one module: the names of its parts, which are in no FQN."""


def as_one(model: Models) -> torch.nn.Module:
    """Return one module of several models by name, or of the parts of one. Anything else is returned as it
    is, and `check` refuses what is none."""
    import torch

    by_name, mark = model, _MARK
    if isinstance(model, list | tuple):
        by_name, mark = {f"part{number}": part for number, part in enumerate(model)}, _PARTS
    if not isinstance(by_name, Mapping) or not _is_several(by_name):
        return cast(torch.nn.Module, model)
    one = torch.nn.Module()
    one._modules.update(by_name)
    setattr(one, mark, tuple(by_name))
    return one


def _is_several(model: Mapping[str, torch.nn.Module]) -> bool:
    """Return whether these are models by names that a checkpoint can tell apart."""
    import torch

    return (
        bool(model)
        and all(isinstance(name, str) and _is_name(name) for name in model)
        and all(isinstance(one, torch.nn.Module) for one in model.values())
    )


def _is_name(name: str) -> bool:
    return name.isidentifier() and name not in SEGMENTS.values()


def _is_state_dict(values: Mapping[object, object]) -> bool:
    import torch

    return any(isinstance(value, torch.Tensor) for value in values.values())


def check(name: str, model: object) -> None:
    """Raise ArgumentError CKM516 for what is neither a model, nor several by name, nor parts of one."""
    if isinstance(model, list | tuple) and model:
        for number, part in enumerate(model):
            argument_checks.module(f"{name}[{number}]", part)
        return
    if not isinstance(model, Mapping) or _is_state_dict(model):
        argument_checks.module(name, model)
        return
    for key, one in model.items():
        if not isinstance(key, str) or not _is_name(key):
            raise ArgumentError(
                "CKM516",
                f"{name}: has a model of the name {key!r}, expected letters, digits and _, and no"
                f" name of a wrapper ({', '.join(SEGMENTS.values())})",
                'give names such as {"policy": model, "value": other}',
            )
        argument_checks.module(f"{name}[{key!r}]", one)
    if not model:
        raise ArgumentError(
            "CKM516", f"{name}: is an empty dict, expected models by name", "give at least one"
        )


def names_of(model: object) -> tuple[str, ...]:
    """Return the names of the models in one module of `as_one`; () for any other."""
    found: tuple[str, ...] = getattr(model, _MARK, ())
    return found


def plain_names(model: torch.nn.Module, keys: Collection[str]) -> dict[str, str]:
    """Return key -> plain FQN. Wrappers are stripped from the names of each model by itself: one may
    be in DDP, another not. Raises SourceError CKM114 on a collision, LoadError CKM505 on one of two parts."""
    parts: tuple[str, ...] = getattr(model, _PARTS, ())
    names = parts or names_of(model)
    if not names:
        return strip_wrappers(keys, "model")
    plain: dict[str, str] = {}
    for name in names:
        head = f"{name}."
        inner = {key.removeprefix(head): key for key in keys if key.startswith(head)}
        stripped = strip_wrappers(inner, name)
        plain.update({inner[key]: fqn if parts else head + fqn for key, fqn in stripped.items()})
    if parts:
        _refuse_two_of_a_name(plain)
    return {key: plain[key] for key in keys}


def _refuse_two_of_a_name(plain: Mapping[str, str]) -> None:
    """Raise LoadError CKM505 for a name that two parts of a model have."""
    first: dict[str, str] = {}
    for key, fqn in plain.items():
        if first.setdefault(fqn, key) != key:
            one, other = (k.partition(".")[0].removeprefix("part") for k in (first[fqn], key))
            raise LoadError(
                "CKM505",
                f"model: {fqn} is in parts {one} and {other}, expected it in one",
                'give models of their own by name: {"policy": model, "value": other}',
            )
