"""Short `repr`s of reports: a count and the first names, in place of thousands of names.

LoadReport(loaded=('a', 'b', 'c', +27), step=100)       fields that are empty are left out
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SHOWN = 3
"""Items of a collection that are shown."""
MAX_CHARS = 80
"""Characters of one value that are shown."""


class ShortRepr:
    """Gives a dataclass that is declared with `repr=False` a `repr` of a few lines at most.

    Fields that are empty or have their default are left out; of a long collection the first items
    are shown, and how many more there are.
    """

    def __repr__(self: DataclassInstance) -> str:
        shown = (
            f"{field.name}={short(value)}"
            for field in fields(self)
            if not _is_empty(value := getattr(self, field.name)) and value != _default(field)
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def short(value: object) -> str:
    """Return `repr(value)`, shortened: first items of collections, first characters of the rest."""
    if not isinstance(value, Mapping | tuple | list | set | frozenset):
        return _cut(repr(value))
    items = list(islice(value, SHOWN))
    if isinstance(value, Mapping):
        parts = [f"{_cut(repr(key))}: {_cut(repr(value[key]))}" for key in items]
        opening, closing = "{}"
    else:
        parts = [_cut(repr(item)) for item in items]
        opening, closing = "[]" if isinstance(value, list) else "()"
    more = len(value) - len(items)
    return f"{opening}{', '.join([*parts, f'+{more:,}'] if more else parts)}{closing}"


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _cut(text: str) -> str:
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 3]}..."


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Collection) and not value)
