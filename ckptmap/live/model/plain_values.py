"""Plain values of Python's own classes, which a checkpoint can hold: Counter -> dict, TorchVersion -> str."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLASSES: tuple[Any, ...] = (bool, int, float, str, bytes)
PLAIN = frozenset((*CLASSES, type(None)))
"""Classes of values that are as a checkpoint holds them. Lists of such, as the states of random generators, are long:
they are looked through at once."""


def simplified(value: object) -> object:
    """Return a nested value with Python's own classes in place of their subclasses.

    Anything else stays as it is, and the writer refuses it by name.
    """
    if isinstance(value, Mapping):
        return {simplified(key): simplified(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        is_plain = PLAIN.issuperset(map(type, value))
        items = [*value] if is_plain else [simplified(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return str.__str__(value)  # a member of a str enum calls itself by its class
    return next((kind(value) for kind in CLASSES if isinstance(value, kind)), value)


def has_plain_classes(value: object) -> bool:
    """Return whether no value in it is of a subclass, which `simplified` would replace."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            has_plain_classes(key) and has_plain_classes(item) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(has_plain_classes, value))
    return type(value) in CLASSES or not isinstance(value, CLASSES)
