"""A list of optimizers' states, as Lightning saves several, as the state of one optimizer with all their groups.

[{"state": {0: a}, "param_groups": [{"params": [0]}]},      {"state": {0: a, 1: b},
 {"state": {0: b}, "param_groups": [{"params": [0]}]}]  ->   "param_groups": [{"params": [0]}, {"params": [1]}]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptmap.optim.state import GROUPS, PARAMS, STATE, expanded
from ckptmap.tensors import Leaf, Path


def count_of(leaves: Iterable[Path]) -> int:
    """Return how many states the list has; 0: it is no list."""
    return len({path[0] for path in leaves if len(path) > 1 and isinstance(path[0], int)})


def joined(leaves: Mapping[Path, Leaf]) -> dict[Path, Leaf]:
    """Return the leaves of one state: parameters and groups are counted on from optimizer to optimizer."""
    by_optimizer: dict[int, dict[Path, Leaf]] = {}
    for path, leaf in leaves.items():
        if len(path) > 1 and isinstance(path[0], int):
            by_optimizer.setdefault(path[0], {})[path[1:]] = leaf
    found: dict[Path, Leaf] = {}
    first_param = first_group = 0
    for number in sorted(by_optimizer):
        own = expanded(by_optimizer[number])
        params, groups = 0, 0
        for path, leaf in own.items():
            match path:
                case (key, int(place), *rest) if key == STATE:
                    found[(STATE, place + first_param, *rest)] = leaf
                case (key, int(place), name, *rest) if key == GROUPS:
                    groups = max(groups, place + 1)
                    if name == PARAMS and isinstance(leaf, list):
                        params += len(leaf)
                        leaf = [index + first_param for index in leaf]
                    found[(GROUPS, place + first_group, name, *rest)] = leaf
        first_param, first_group = first_param + params, first_group + groups
    return found
