"""The key form by FQN: {"state": {fqn: {name: t}}, "param_groups": [{"params": [fqn, ...], ...}]}.

What `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, `FSDP.optim_state_dict`
and ckptmap write, and what `set_optimizer_state_dict` takes; in DCP the same, leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.optim.nested_keys import read_nested, write_nested
from ckptmap.optim.state import Optimizer, StateKeys, StateValue
from ckptmap.tensors import Leaf, Path


class ByFqn:
    """State by parameter name, nested."""

    name = "fqn"
    whole = False

    def read(self, leaves: Mapping[Path, Leaf]) -> StateKeys | None:
        keys = read_nested(leaves)
        return None if keys is None or keys.by_index else keys

    def write(self, optimizer: Optimizer) -> list[tuple[Path, StateValue]]:
        return write_nested(optimizer, optimizer.groups, lambda fqn: fqn)
