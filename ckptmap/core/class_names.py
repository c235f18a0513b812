"""Classes by their names, which tells of a library's classes without an import of the library."""

from __future__ import annotations

from functools import lru_cache


def is_a(value: object, name: str) -> bool:
    """Return whether the class of a value, or one that it is derived from, has this name."""
    return name in _names(type(value))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _names(kind: type) -> frozenset[str]:
    return frozenset(cls.__name__ for cls in kind.__mro__)
