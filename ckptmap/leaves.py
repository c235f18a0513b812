"""What leaves of a state dict are: their keys, their nesting, and what foreign objects they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptmap.tensors import Leaf, Opaque, Path, PerRank, StoredTensor


@dataclass(frozen=True)
class Told:
    """A leaf in place of optimizer state: where the names of its parameters came from (`order`), or
    why it has none that could be used (`refused`)."""

    order: str = ""
    refused: str = ""


class ListIndex(int):
    """A path segment that counts in a list: equal to the integer, told from an integer dict key."""

    __slots__ = ()


def by_rank(leaf: Leaf) -> Sequence[Leaf]:
    """What each rank holds of it; one value where they do not differ."""
    return leaf.values if isinstance(leaf, PerRank) else (leaf,)


def counts(segment: object) -> bool:
    """Is it a key of a dict that is no text: an integer, or a bool?"""
    return isinstance(segment, int) and type(segment) is not ListIndex


def join(path: Path) -> str:
    """Its key: segments joined with dots."""
    if len(path) == 1:
        return str(path[0])
    return ".".join(map(str, path))


ROLES = ("model", "optimizer", "other")


def logical_key(role: str, fqn: str) -> str:
    """How a manifest names a tensor: `fqn` a weight, `role:fqn` the others, and a weight with a
    colon in its name."""
    return fqn if role == "model" and ":" not in fqn else f"{role}:{fqn}"


def role_and_fqn(key: str) -> tuple[str, str]:
    """What `logical_key` made a key of."""
    role, colon, fqn = key.partition(":")
    return (role, fqn) if colon and role in ROLES else ("model", key)


def nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Leaves by path -> nested dicts, and lists where segments are `ListIndex` 0..n-1."""
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
    counted = bool(value) and all(type(key) is ListIndex for key in value)
    if counted and sorted(value) == list(range(len(value))):
        return [value[index] for index in range(len(value))]
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


# ------------------------------------------------------------------ compared


def differing(mine: Mapping[Path, Any], source: Mapping[Path, Any]) -> list[str]:
    """What values without tensors have become in an output: every one of the source must be there,
    and be equal. Tuples and lists are alike, and so are keys 1 and "1": JSON and DCP know one."""
    ours, theirs = dict(_atoms(mine)), dict(_atoms(source))
    problems = []
    for path, value in theirs.items():
        name = ".".join(text for _, text in path)
        if path not in ours:
            problems.append(f"{name}: is no tensor, and is not in the output")
        elif not _alike(ours[path], value):
            problems.append(f"{name}: {ours[path]!r:.60}, the source has {value!r:.60}")
    return problems


def unequal(a: Mapping[Path, Any], b: Mapping[Path, Any]) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """How many values both hold, and those that differ, by name; alike as in `differing`."""
    ours, theirs = dict(_atoms(a)), dict(_atoms(b))
    both = [path for path in ours if path in theirs]
    found = {
        ".".join(text for _, text in path): (ours[path], theirs[path])
        for path in both
        if not _alike(ours[path], theirs[path])
    }
    return len(both), found


_Atom: TypeAlias = tuple[tuple[tuple[bool, str], ...], Any]
"""Where it is, each segment with whether it counts in a list; and the value."""


def _atoms(values: Mapping[Path, Any]) -> Iterator[_Atom]:
    for path, value in values.items():
        yield from _atoms_below(tuple((type(s) is ListIndex, str(s)) for s in path), value)


def _atoms_below(path: tuple[tuple[bool, str], ...], value: Any) -> Iterator[_Atom]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _atoms_below((*path, (False, str(key))), item)
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _atoms_below((*path, (True, str(index))), item)
    else:
        yield path, value


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping | list | tuple):  # empty ones: what is in others is compared itself
        return isinstance(b, Mapping) == isinstance(a, Mapping) and len(a) == len(b) == 0
    return (type(a) is type(b) and bool(a == b)) or (a != a and b != b)
