"""Classes by their names, which tells of a library's classes without an import of the library."""

from __future__ import annotations

from weakref import WeakKeyDictionary

_names: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def is_a(value: object, name: str) -> bool:
    """Return whether the class of a value, or one that it is derived from, has this name."""
    kind = type(value)
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = frozenset(cls.__name__ for cls in kind.__mro__)
    return name in names
