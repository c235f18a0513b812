"""Read and write optimizer state as nested dicts, whether its keys are indices or FQNs.

{"state": {key: {name: t}}, "param_groups": [{"params": [key, ...], "lr": 0.1}, ...]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckptmap.core.state_paths import ListIndex
from ckptmap.optim.state import (
    FORMAT_VERSION,
    GROUPS,
    NAMES,
    PARAMS,
    STATE,
    Optimizer,
    ParamGroup,
    StateKeys,
    StateValue,
)
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Leaf, Path


def read_nested(leaves: Mapping[Path, Leaf]) -> StateKeys | None:
    """Return whose state each leaf is; None: there is neither state nor a group.

    The keys are indices if all of them are integers, or the strings that DCP makes of integers.
    """
    state: dict[Path, tuple[str, Path]] = {}
    hyper: dict[Path, tuple[int, Path]] = {}
    params: dict[int, list[str]] = {}
    rest: list[Path] = []
    listed = {str(path[1]) for path in leaves if path[0] == GROUPS and path[2:3] == (PARAMS,)}
    for path, leaf in leaves.items():
        if path[0] == STATE and len(path) > 1:
            state[path] = (str(path[1]), path[2:])
        elif path[0] == GROUPS and len(path) > 2 and str(path[1]).isdigit():
            number = int(path[1])
            params.setdefault(number, [])
            if path[2] == PARAMS or (path[2:] == (NAMES,) and str(number) not in listed):
                params[number] += _keys(leaf)
            else:
                hyper[path] = (number, path[2:])
        elif path != (FORMAT_VERSION,) and (path not in ((STATE,), (GROUPS,)) or leaf):
            rest.append(path)  # an empty dict or list is nothing
    if not (state or params):
        return None
    at = {number: place for place, number in enumerate(sorted(params))}
    hyper = {path: (at[number], name) for path, (number, name) in hyper.items()}
    keys = [key for key, _ in state.values()] + [
        key for keys_of_group in params.values() for key in keys_of_group
    ]
    by_index = bool(keys) and all(key.isdecimal() for key in keys)
    return StateKeys(by_index, state, hyper, [params[number] for number in sorted(params)], rest)


def _keys(leaf: Leaf) -> list[str]:
    """Return the parameters of a group; older planners of DCP store them as one leaf each."""
    return [str(key) for key in leaf] if isinstance(leaf, list | tuple) else [str(leaf)]


def write_nested(
    optimizer: Optimizer, groups: Sequence[ParamGroup], key: Callable[[str], str | int]
) -> list[tuple[Path, StateValue]]:
    """Return the leaves to write: state under `key(fqn)`, and groups as one list, or leaf by leaf if
    one holds a tensor."""
    leaves: list[tuple[Path, StateValue]] = [
        ((STATE, key(leaf.key), *leaf.name), leaf.value) for leaf in optimizer.leaves
    ]
    if not leaves:
        leaves.append(((STATE,), {}))
    if any(map(_holds_lazy, groups)):
        for number, group in enumerate(groups):
            leaves += _leaves((GROUPS, ListIndex(number)), group)
    elif groups:
        leaves.append(((GROUPS,), [dict(group) for group in groups]))
    return leaves


def _holds_lazy(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_lazy, value.values()))
    return isinstance(value, LazyTensor)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, StateValue]]:
    if (isinstance(value, Mapping) and value and _holds_lazy(value)) or len(path) == 2:
        for name, item in value.items():
            yield from _leaves((*path, name), item)
    else:
        yield path, value
