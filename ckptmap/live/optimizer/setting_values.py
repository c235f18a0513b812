"""Values of parameter groups: as plain values that can be compared, and in the type that a live group has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from typing import Any

from ckptmap.live.optimizer.group_objects import is_numpy_number
from ckptmap.storage.lazy_tensor import LazyTensor

NO_TENSOR = "no tensor"


def form_of(value: object) -> str:
    """Return whether a value, or the first one in it, is a tensor, and of which dtype."""
    import torch

    if isinstance(value, list | tuple | Mapping) and value:
        return form_of(next(iter(value.values() if isinstance(value, Mapping) else value)))
    if isinstance(value, torch.Tensor | LazyTensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor"
    return NO_TENSOR


def plain(value: object) -> object:
    """Return a value without tensors: a tensor of one element is its number, in a list too, as betas
    may be. A dict of 0, 1, ... is the list that a file with tensors in it has taken apart."""
    import torch

    if isinstance(value, Mapping) and _is_list(value):
        value = [*value.values()]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if is_numpy_number(value):
        return value.item()
    if isinstance(value, LazyTensor):
        value = value.read()
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            packed = str(value.dtype).endswith(
                "_x2"
            )  # two values in a byte, which torch cannot list
            return (value.view(torch.uint8) if packed else value).tolist()
        return _shortest(value.item()) if value.dtype == torch.float32 else value.item()
    return value


def as_read(value: object) -> object:
    """Return a value of a checkpoint as it was saved: tensors are read."""
    if isinstance(value, Mapping) and _is_list(value):
        return [*map(as_read, value.values())]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(as_read, value))
    if type(value) is dict:
        return {key: as_read(item) for key, item in value.items()}
    return value.read() if isinstance(value, LazyTensor) else copy.deepcopy(value)


def is_same(one: object, other: object) -> bool:
    """Return whether two plain values are equal. A NaN equals itself, and a tuple the list of its items: one that
    holds tensors is stored as a list."""
    one, other = _as_lists(one), _as_lists(other)
    return one == other or repr(one) == repr(other)


def in_live_type(live: object, stored: object, padded: bool = True) -> object:
    """Return the checkpoint's value in the type of the live one. A list has as many items as the live one,
    as betas of another optimizer of the same algorithm must have, unless `padded` is False."""
    import torch

    if isinstance(live, torch.Tensor) and isinstance(stored, LazyTensor) and stored.numel() != 1:
        return stored.read().to(live)
    value: Any = plain(stored)
    if isinstance(live, torch.Tensor) and isinstance(value, bool | int | float):
        return torch.full_like(live, float(value))
    if isinstance(live, torch.Tensor) and isinstance(value, list):
        return torch.tensor(value, dtype=live.dtype).to(live)
    if is_numpy_number(live) and isinstance(value, bool | int | float):
        number: Any = type(live)
        return number(value)
    if isinstance(live, Enum) and value in [one.value for one in type(live)]:
        return type(live)(value)
    if isinstance(live, list | tuple) and isinstance(value, list | tuple):
        wanted = [*value, *live[len(value) :]][: len(live)] if live and padded else value
        items = [in_live_type(a, b, padded) for a, b in zip(live, wanted, strict=False)]
        items += wanted[len(items) :]
        return type(live)(items)
    if isinstance(live, Mapping) and isinstance(value, Mapping):
        entries = {key: in_live_type(live.get(key), item, padded) for key, item in value.items()}
        kind: Any = type(live)  # a Counter stays one
        return kind(entries)
    return value


def _is_list(value: Mapping[object, object]) -> bool:
    return bool(value) and [*value] == [*range(len(value))]


def _as_lists(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [*map(_as_lists, value)] if isinstance(value, list | tuple) else value


def _shortest(number: float) -> float:
    """Return the shortest decimal that rounds to this float32: 0.001, where `item` returns
    0.0010000000474974513."""
    import torch

    for digits in (6, 7, 8):
        short = float(f"{number:.{digits}g}")
        if float(torch.tensor(short, dtype=torch.float32)) == number:
            return short
    return number
