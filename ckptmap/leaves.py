"""What leaves of a state dict are: their keys, their nesting, and what foreign objects they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptmap.tensors import Leaf, Opaque, Path, PerRank, StoredTensor


def join(path: Path) -> str:
    """Its key: segments joined with dots."""
    if len(path) == 1:
        return str(path[0])
    return ".".join(map(str, path))


def nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Leaves by path -> nested dicts; runs of integer keys 0..n-1 become lists."""
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        node = tree
        for segment in path[:-1]:
            node = node.setdefault(segment, {})
        node[path[-1]] = value
    return {key: _listed(value) for key, value in tree.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    value = {key: _listed(item) for key, item in value.items()}
    if value and list(value) == list(range(len(value))):
        return list(value.values())
    return value


def opaques(value: Any) -> Iterator[Opaque]:
    """Every object of a class that is never called, at any depth."""
    if isinstance(value, Opaque):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from opaques(key)
            yield from opaques(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from opaques(item)
    elif isinstance(value, PerRank):
        yield from opaques(value.values)


def holds_tensor(value: Any) -> bool:
    """Is there a stored tensor, inside of foreign objects as well?"""
    if isinstance(value, StoredTensor):
        return True
    if isinstance(value, Opaque):
        return holds_tensor((value.args, value.state))
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_tensor, value))


def class_of(leaf: Leaf) -> str:
    """A name for what it is, of the first foreign object in it."""
    found = next(opaques(leaf), None)
    return found.class_name if found else type(leaf).__name__
