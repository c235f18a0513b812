"""Select the optimizer state that belongs to the weights of a plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

from ckptmap.optim.state import NAMES, PARAMS, Optimizer, ParamGroup


@dataclass(frozen=True)
class Carried:
    """The state that goes along; `dropped`: key -> reason; `strangers`: keys that are no weight's."""

    optimizer: Optimizer
    dropped: Mapping[str, str]
    strangers: tuple[str, ...]


def select_state(
    optimizer: Optimizer,
    weights: Container[str],
    left: Mapping[str, str],
    drop: Callable[[str], str | None],
) -> Carried:
    """Return the state without that of weights which stay behind, and without what `drop` names.

    `left` is FQN -> reason. `drop` returns a reason for a key such as `optimizer.layers.0.weight`,
    or None.
    """
    dropped: dict[str, str] = {}
    strangers: list[str] = []
    for fqn in optimizer.keys:
        reason = drop(f"optimizer.{fqn}")
        if reason is None and fqn not in weights:
            strangers.append(fqn)
            continue
        if reason is None and fqn in left:
            reason = f"with its weight: {left[fqn]}"
        if reason is not None:
            dropped[f"optimizer.{fqn}"] = reason
    left_out = {key.removeprefix("optimizer.") for key in dropped} | set(strangers)
    leaves = [leaf for leaf in optimizer.leaves if leaf.key not in left_out]
    groups = [_without(group, left_out) for group in optimizer.groups]
    rest = {}
    for path, value in optimizer.rest.items():
        key = ".".join(map(str, ("optimizer", *path)))
        reason = drop(key)
        if reason is None:
            rest[path] = value
        else:
            dropped[key] = reason
    selected = replace(optimizer, leaves=leaves, groups=groups, rest=rest)
    return Carried(selected, dropped, tuple(strangers))


def _without(group: ParamGroup, left_out: set[str]) -> ParamGroup:
    params = [fqn for fqn in group[PARAMS] if fqn not in left_out]
    return {
        name: list(params) if name in (PARAMS, NAMES) else value for name, value in group.items()
    }
