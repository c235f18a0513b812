"""Values in parameter groups that are no plain values: functions, and objects of any class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def is_object(value: object) -> bool:
    """Return whether a value, or one nested in it, is neither plain nor a tensor."""
    import torch

    if isinstance(value, Mapping):
        return any(map(is_object, value.values())) or not all(map(_is_key, value))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(is_object, value))
    plain = (bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device)
    return value is not None and not isinstance(value, plain)


def names(groups: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the names of the values in these groups that are objects."""
    return sorted(
        {k for group in groups for k, v in group.items() if k != "params" and is_object(v)}
    )


def _is_key(key: object) -> bool:
    return isinstance(key, bool | int | float | str | None)
