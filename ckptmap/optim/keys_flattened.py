"""The key form of one dotted key an entry: "state.<fqn>.<name>", "param_groups.<fqn>.<name>".

What `get_optimizer_state_dict` makes with `flatten_optimizer_state_dict=True`, and with it
torchtitan: every hyper-parameter is repeated for each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.errors import PlanError
from ckptmap.optim.state import GROUPS, PARAMS, STATE, Optimizer, StateKeys, StateValue
from ckptmap.tensors import Leaf, Path, StoredTensor


class Flattened:
    """State by parameter name, one key an entry."""

    name = "flattened"
    whole = False

    def read(self, leaves: Mapping[Path, Leaf]) -> StateKeys | None:
        """Return whose state each leaf is; groups are the parameters with equal hyper-parameters."""
        state: dict[Path, tuple[str, Path]] = {}
        hyper: dict[str, dict[str, Path]] = {}
        rest: list[Path] = []
        for path in leaves:
            kind, key, name = _split(path)
            if kind == STATE:
                state[path] = (key, (name,))
            elif kind == GROUPS:
                hyper.setdefault(key, {})[name] = path
            else:
                rest.append(path)
        if not (state or hyper):
            return None
        groups = _regrouped(hyper, leaves)
        fqns_by_group = {
            path: (number, (name,))
            for number, params in enumerate(groups)
            for key in params
            for name, path in hyper[key].items()
        }
        return StateKeys(False, state, fqns_by_group, groups, rest)

    def write(self, optimizer: Optimizer) -> list[tuple[Path, StateValue]]:
        """Return the leaves to write; a parameter without state is left out, as torch leaves it out.

        Raises PlanError CKM207 for nested state, which one dotted key cannot name.
        """
        leaves: list[tuple[Path, StateValue]] = []
        for leaf in optimizer.leaves:
            if len(leaf.name) > 1:
                raise PlanError(
                    "CKM207",
                    f"{leaf.key}: its optimizer state is nested ({leaf.title}), which a flattened key"
                    " cannot express",
                    "write it with --optimizer-keys fqn",
                )
            leaves += [((f"{STATE}.{leaf.key}.{name}",), leaf.value) for name in leaf.name]
        for group in optimizer.groups:
            for fqn in group[PARAMS]:
                leaves += [
                    ((f"{GROUPS}.{fqn}.{name}",), value)
                    for name, value in group.items()
                    if name != PARAMS
                ]
        return leaves


def _split(path: Path) -> tuple[str, str, str]:
    """Split a flattened key: ("state.layers.0.weight.exp_avg",) -> ("state", "layers.0.weight", "exp_avg")"""
    if len(path) == 1 and isinstance(path[0], str):
        kind, _, tail = path[0].partition(".")
        key, _, name = tail.rpartition(".")
        if key and kind in (STATE, GROUPS):
            return kind, key, name
    return "", "", ""


def _regrouped(
    hyper: Mapping[str, Mapping[str, Path]], leaves: Mapping[Path, Leaf]
) -> list[list[str]]:
    """Return the parameters of each group. Hyper-parameters that are tensors count as equal here: their
    values are compared later."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for key, paths in hyper.items():
        values = {name: leaves[path] for name, path in paths.items()}
        settings = tuple(
            (name, "a tensor" if isinstance(value, StoredTensor) else repr(value))
            for name, value in sorted(values.items())
        )
        groups.setdefault(settings, []).append(key)
    return list(groups.values())
