"""Several models in one checkpoint: each is named, and its name is the first segment of its FQNs.

{"policy": m, "value": v}  ->  policy.layers.0.weight, value.layers.0.weight

They become one module for the length of a call. It has no forward, and the models do not notice it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

from ckptmap.core import argument_checks
from ckptmap.errors import ArgumentError
from ckptmap.mapping.wrappers import SEGMENTS, strip_wrappers

if TYPE_CHECKING:
    import torch

Models: TypeAlias = "torch.nn.Module | Mapping[str, torch.nn.Module]"
"""A model, or several by name."""

KEY = "models"
"""Key of the names among the settings of a run."""
_MARK = "_ckptmap_models"
"""Attribute of the one module: the names of its models."""


def as_one(model: Models) -> torch.nn.Module:
    """Return one module of several models by name. Anything else is returned as it is, and `check`
    refuses what is none."""
    import torch

    if not isinstance(model, Mapping) or not _is_several(model):
        return cast(torch.nn.Module, model)
    one = torch.nn.Module()
    one._modules.update(model)
    setattr(one, _MARK, tuple(model))
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
    """Raise ArgumentError CKM516 for what is neither a model nor several by name."""
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
    be in DDP, another not. Raises SourceError CKM114 on a collision."""
    names = names_of(model)
    if not names:
        return strip_wrappers(keys, "model")
    plain: dict[str, str] = {}
    for name in names:
        head = f"{name}."
        inner = {key.removeprefix(head): key for key in keys if key.startswith(head)}
        stripped = strip_wrappers(inner, name)
        plain.update({inner[key]: head + fqn for key, fqn in stripped.items()})
    return {key: plain[key] for key in keys}
