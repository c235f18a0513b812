"""Tuples that hold tensors: a checkpoint has their items, each under its index, as it has those of a list.

{"hidden": (tensor, [tensor])}  ->  extra.hidden.0, extra.hidden.1.0, extra.ckptmap.tuples = [["hidden"]]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptmap.live.model.plain_values import PLAIN

KEY = "ckptmap.tuples"
"""Name, beside the items of a dict, of the list of its tuples: the key of an item, and indices below it."""

Place = list[str | int]


def of(value: Mapping[Any, object]) -> list[Place]:
    """Return the places of the tuples with tensors in them among the items of a dict, at any depth of
    lists and tuples. A dict below has its own."""
    return [place for key, item in value.items() for place in _below(item, [str(key)])]


def holds_tensor(value: object) -> bool:
    """Return whether a nested value of dicts and lists has a tensor in it."""
    import torch

    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return not PLAIN.issuperset(map(type, value)) and any(map(holds_tensor, value))
    return isinstance(value, torch.Tensor)


def _below(value: object, place: Place) -> Iterator[Place]:
    if not isinstance(value, list | tuple) or not holds_tensor(value):
        return
    if isinstance(value, tuple):
        yield place
    for number, item in enumerate(value):
        yield from _below(item, [*place, number])


def restored(value: dict[Any, object]) -> dict[Any, object]:
    """Return a saved dict with tuples in place of the lists that they were read as. A place that the
    dict has not, or that is no list, is passed over."""
    places = value.pop(KEY, None)
    names = {str(key): key for key in value}
    found = [*filter(_is_place, places)] if isinstance(places, list | tuple) else []
    for key, *indices in sorted(found, key=len, reverse=True):
        if key in names:
            value[names[key]] = _with_tuple(value[names[key]], indices)
    return value


def _with_tuple(value: object, indices: Sequence[int]) -> object:
    """Return the value with a tuple in place of the list at these indices."""
    if not isinstance(value, list):
        return value
    if not indices:
        return tuple(value)
    at, *rest = indices
    return [_with_tuple(item, rest) if n == at else item for n, item in enumerate(value)]


def _is_place(place: object) -> bool:
    return (
        isinstance(place, list | tuple)
        and bool(place)
        and isinstance(place[0], str)
        and all(isinstance(index, int) for index in place[1:])
    )
