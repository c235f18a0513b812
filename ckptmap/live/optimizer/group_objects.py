"""Values in parameter groups that are no plain values: functions, and objects of any class.

A checkpoint holds none of them. What can be told of one in a text is recorded, and compared by `load(exact=True)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from typing_extensions import TypeIs


def is_object(value: object) -> bool:
    """Return whether a value, or one nested in it, is neither plain nor a tensor. A number of NumPy is saved as
    Python's."""
    import torch

    if isinstance(value, Mapping):
        keys = (isinstance(key, bool | int | float | str | None) for key in value)
        return any(map(is_object, value.values())) or not all(keys)
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(is_object, value))
    plain = (bool, int, float, complex, str, bytes, torch.Tensor)
    return value is not None and not isinstance(value, plain) and not is_numpy_number(value)


def is_numpy_number(value: object) -> TypeIs[numpy.number[Any] | numpy.bool_]:
    """Return whether a value is a number of NumPy that is none of Python's, as numpy.float32 is."""
    import numpy

    return isinstance(value, numpy.number | numpy.bool_) and not isinstance(value, float | complex)


def python_numbers(value: object) -> object:
    """Return a value, or a list or tuple of values, with Python's numbers in place of NumPy's."""
    if type(value) in (list, tuple):
        items: list[object] = [*map(python_numbers, value)]  # type: ignore[call-overload]
        return items if isinstance(value, list) else tuple(items)
    return value.item() if is_numpy_number(value) else value


def names(groups: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the names of the values in these groups that are objects, and what can be told of them."""
    return sorted({text for group in groups for text in _told(group)})


def _told(group: Mapping[str, object]) -> Iterator[str]:
    import numpy
    import torch

    for key, value in group.items():
        if key == "params":
            continue
        if is_numpy_number(value):
            yield f"{key}: {type(value).__module__}.{type(value).__name__}"
        elif isinstance(value, torch.dtype | torch.device | Enum):
            yield f"{key}={value}"
        elif isinstance(value, numpy.ndarray):
            digest = hashlib.blake2b(value.tobytes(), digest_size=4).hexdigest()
            yield f"{key}={value.dtype}{list(value.shape)} of digest {digest}"
        elif is_object(value):
            yield key
