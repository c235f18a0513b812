"""Flatten a nested state dict into leaves by path, and nest such leaves again.

{"model": {"w": t}, "ema": [t0, t1], "betas": [0.9, 0.95]}
    <-> {("model", "w"): t, ("ema", 0): t0, ("ema", 1): t1, ("betas",): [0.9, 0.95]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptmap.core.state_paths import ATOMS, ListIndex
from ckptmap.errors import PlanError, SourceError
from ckptmap.tensors import Leaf, Opaque, Path, StoredTensor

MAX_DEPTH = 64
MIN_LIMIT = 100_000
"""The most leaves of a small pickle; a larger one may have as many as it has bytes. Without a
limit, a pickle that nests references to the same list 64 deep would have 2**64 leaves."""
MAX_LISTED = 1 << 16
"""The most holes of a list. A file can name any index, and each hole would take memory."""


def flatten(tree: object, where: str, pickle_nbytes: int) -> dict[Path, Leaf]:
    """Return the leaves by path, in stored order; a list without tensors is one leaf.

    Segments are dict keys, or `ListIndex` in a list or tuple that holds tensors. `where` is the
    file for errors. Raises SourceError CKM106 if the tree is too deep or has too many leaves.
    """
    leaves: dict[Path, Leaf] = {}
    _flatten(tree, (), leaves, where, max(MIN_LIMIT, pickle_nbytes))
    return leaves


def _flatten(node: Any, path: Path, leaves: dict[Path, Leaf], where: str, limit: int) -> None:
    if len(path) > MAX_DEPTH or len(leaves) > limit:
        raise SourceError(
            "CKM106",
            f"{where}: nested deeper than {MAX_DEPTH}, or holds more than {limit} leaves",
            "the file is damaged, or a dict in it contains itself: copy it again, or save it without that dict",
        )
    if isinstance(node, dict) and node and all(isinstance(key, str | int) for key in node):
        for key, value in node.items():
            if isinstance(value, StoredTensor):
                leaves[(*path, key)] = value
            else:
                _flatten(value, (*path, key), leaves, where, limit)
    elif isinstance(node, list | tuple) and holds_tensor(node):
        for index, value in enumerate(node):
            _flatten(value, (*path, ListIndex(index)), leaves, where, limit)
    else:
        leaves[path] = node


def holds_tensor(node: object) -> bool:
    """Return whether these nested lists and dicts hold a tensor, plain or of a subclass."""
    seen: set[int] = set()
    todo = [node]
    while todo:
        value = todo.pop()
        if type(value) in ATOMS:
            continue
        if isinstance(value, StoredTensor) or (isinstance(value, Opaque) and value.info):
            return True
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            todo.extend(value.values() if isinstance(value, dict) else value)
    return False


def nest(leaves: Iterable[tuple[Path, object]]) -> Any:
    """Return nested dicts with these leaves, and lists where the segments are `ListIndex`.

    Raises PlanError CKM114 if the path of one leaf is that of another, or goes through it.
    """
    root = _Branch()
    for path, value in leaves:
        if not path:
            return value
        node = root
        for depth, segment in enumerate(path[:-1]) if len(path) > 1 else ():
            below = node.setdefault(segment, _Branch())
            if type(below) is not _Branch:
                raise _collision(path[: depth + 1], path)
            node = below
        if path[-1] in node:
            raise _collision(path, path)
        node[path[-1]] = value
    return _listed(root)


class _Branch(dict[object, object]):
    """A dict that `nest` made; it has its own type because a leaf can be a dict."""


def _collision(inner: Path, outer: Path) -> PlanError:
    return PlanError(
        "CKM114",
        f"{'.'.join(map(str, outer))}: would lie where {'.'.join(map(str, inner))} already is",
        "rename or drop one of them",
    )


def _listed(node: Mapping[object, object]) -> object:
    """Return branches as plain dicts, or as lists where every segment is a `ListIndex`.

    None fills the holes of a list, as in torch, so that all other items keep their index. A list
    with too many holes becomes a dict.
    """
    items = {k: _listed(v) if type(v) is _Branch else v for k, v in node.items()}
    if not items or any(type(key) is not ListIndex for key in items):
        return items
    indices = [key for key in items if type(key) is ListIndex]
    if min(indices) < 0 or max(indices) >= MAX_LISTED + len(items):
        return {int(index): items[index] for index in indices}
    return [items.get(index) for index in range(max(indices) + 1)]
