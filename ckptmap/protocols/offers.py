"""Ask once for each class whether its values offer what a protocol describes.

`isinstance` with a protocol looks at every attribute that the protocol names, each time: with 100,000
tensors that takes longer than all else.
"""

from __future__ import annotations

from typing import TypeGuard, TypeVar

P = TypeVar("P")

_KNOWN: dict[tuple[type, type], bool] = {}


def offers(value: object, protocol: type[P]) -> TypeGuard[P]:
    """Return `isinstance(value, protocol)`, which must be the same for all values of a class."""
    key = type(value), protocol
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = isinstance(value, protocol)
    return known
