"""The key form of `optimizer.state_dict()`: each parameter is a number, counted through the groups.

    {"state": {0: {...}}, "param_groups": [{"params": [0, 1], ...}, {"params": [2], ...}]}

Written with `param_names` in the groups, so that the file says which is which;
`optimizer.load_state_dict` takes it as its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from ckptmap.core.printable import advised
from ckptmap.errors import PlanError
from ckptmap.optim.nested_keys import read_nested, write_nested
from ckptmap.optim.state import NAMES, PARAMS, Optimizer, StateKeys, StateValue
from ckptmap.tensors import Leaf, Path


class ByIndex:
    """State by position in the groups."""

    name = "index"
    whole = True

    def read(self, leaves: Mapping[Path, Leaf]) -> StateKeys | None:
        keys = read_nested(leaves)
        return keys if keys is not None and keys.by_index else None

    def write(self, optimizer: Optimizer) -> list[tuple[Path, StateValue]]:
        """Return the leaves to write. Raises PlanError CKM207 where a parameter with state is in no group."""
        counter = count()
        index = {fqn: next(counter) for group in optimizer.groups for fqn in group[PARAMS]}
        ungrouped = next((fqn for fqn in optimizer.keys if fqn not in index), None)
        if ungrouped is not None:
            raise PlanError(
                "CKM207",
                f"{ungrouped}: has optimizer state but is in no group, so it has no index",
                f"if it is tied to another weight, leave it out with {advised(drop=f'optimizer.{ungrouped}')}, else"
                " write it by name: --to full --optimizer-keys fqn",
            )
        groups = [
            {**group, PARAMS: [index[fqn] for fqn in group[PARAMS]], NAMES: list(group[PARAMS])}
            for group in optimizer.groups
        ]
        return write_nested(optimizer, groups, index.__getitem__)
