"""What two checkpoints hold beside tensors: step, schedulers, settings of the optimizer, counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptmap.checkpoint import Checkpoint
from ckptmap.lazy import LazyTensor
from ckptmap.leaves import unequal
from ckptmap.optim.state import GROUPS, NAMES, PARAMS
from ckptmap.tensors import Path

RECORD = "ckptmap"
"""What `ckptmap.save` notes of the run itself: how many ranks, on which devices."""
OPTIMIZER = "optimizer"
FEW = 16
"""Elements of a hyper-parameter that is a tensor: a learning rate, betas."""


def unequal_values(a: Checkpoint, b: Checkpoint) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """How many plain values both hold, and those that differ, by name."""
    count, found = 0, {}
    for mine, theirs in ((_kept(a), _kept(b)), *optimizer_pairs(a, b)):
        both, differ = unequal(mine, theirs)
        count += both
        found.update(differ)
    return count, found


def optimizer_pairs(
    a: Checkpoint, b: Checkpoint
) -> Iterator[tuple[dict[Path, Any], dict[Path, Any]]]:
    """Values by path of both, to be held against each other: of the same groups, of the same
    parameter's state, and of what lies beside both."""
    mine, others = a.optimizer_groups, b.optimizer_groups
    for number, other in _group_pairs(mine, others):
        head = (OPTIMIZER, GROUPS, str(number))
        yield _settings(head, mine[number]), _settings(head, others[other])
    theirs = b.optimizer_values
    for fqn, values in a.optimizer_values.items():
        if fqn in theirs:
            yield _values(fqn, values), _values(fqn, theirs[fqn])
    yield _rest(a), _rest(b)


def _group_pairs(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> list[tuple[int, int]]:
    """Numbers of groups that share a parameter; in order, where the names are another scheme's."""
    home = {fqn: number for number, group in enumerate(b) for fqn in group[PARAMS]}
    found = [
        (number, other)
        for number, group in enumerate(a)
        for other in sorted({home[fqn] for fqn in group[PARAMS] if fqn in home})
    ]
    if not found and len(a) == len(b):
        return [(number, number) for number in range(len(a))]
    return found


def _kept(ckpt: Checkpoint) -> dict[Path, Any]:
    return {path: value for path, value in ckpt.plain.items() if path[0] != RECORD}


def _settings(head: Path, group: Mapping[str, Any]) -> dict[Path, Any]:
    return {
        (*head, name): _read(value)
        for name, value in group.items()
        if name not in (PARAMS, NAMES) and not isinstance(value, Mapping)
    }


def _read(value: Any) -> Any:
    """A hyper-parameter that is kept as a tensor, as a number."""
    if isinstance(value, LazyTensor):
        return value.read().tolist() if value.info.numel <= FEW else None
    return value


def _values(fqn: str, values: Mapping[str, Any]) -> dict[Path, Any]:
    return {(OPTIMIZER, f"{fqn}.{name}"): value for name, value in values.items()}


def _rest(ckpt: Checkpoint) -> dict[Path, Any]:
    rest = ckpt.optimizer_reader.named().rest if ckpt.optimizer_reader.present else {}
    return {
        (OPTIMIZER, *path): value
        for path, value in rest.items()
        if not isinstance(value, LazyTensor)
    }
