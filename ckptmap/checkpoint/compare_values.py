"""What two checkpoints hold beside tensors: step, schedulers, settings of the optimizer, counts."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.module_extra_state import plainly, state_at
from ckptmap.core.state_paths import TENSOR, join, unequal
from ckptmap.optim.state import GROUPS, NAMES, PARAMS
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path

RECORD = "ckptmap"
"""What `ckptmap.save` notes of the run itself: how many ranks, on which devices."""
OPTIMIZER = "optimizer"
FEW = 16
"""Elements of a hyper-parameter that is a tensor: a learning rate, betas."""


def unequal_values(a: Checkpoint, b: Checkpoint) -> tuple[int, dict[str, tuple[object, object]]]:
    """How many plain values of both agree, and those that differ, by name; what is said of the run
    itself is no difference."""
    count, found = 0, {}
    mine, theirs, _ = beside_pair(a, b)
    kept = [{path: held[path] for path in held if path[0] != RECORD} for held in (mine, theirs)]
    for mine, theirs, depth in ((kept[0], kept[1], 1), *optimizer_pairs(a, b)):
        agree, differ = unequal(mine, theirs, depth)
        count += agree
        found.update(differ)
    return count, found


Pair: TypeAlias = tuple[dict[Path, object], dict[Path, object], int]
"""Values by path of two checkpoints, and how many segments name an entry."""


def beside_pair(a: Checkpoint, b: Checkpoint, dropped: Container[str] = ()) -> Pair:
    """What is neither weight nor optimizer state, the extra state of modules by plain key; not what
    was dropped of the first."""
    mine, theirs = matched(a, b)
    return _kept(a, mine, dropped), _kept(b, theirs), 1


def matched(a: Checkpoint, b: Checkpoint) -> tuple[dict[Path, Path], dict[Path, Path]]:
    """Paths of the extra state of modules, as they can be held against each other: by plain key,
    but as they are where both have that dict at one place."""
    one, two = (plainly({**c.plain, **c.other}, c.roles.model_root) for c in (a, b))
    heads = [{path[: _key_at(path)] for path in {**c.plain, **c.other}} for c in (a, b)]
    shared = heads[0] & heads[1]
    mine, theirs = (
        {path: plain for path, plain in found.items() if path[: _key_at(path)] not in shared}
        for found in (one, two)
    )
    return mine, theirs


def named_beside(a: Checkpoint, b: Checkpoint) -> dict[str, str]:
    """Names of a's tensors beside the weights -> of those of b that are the same."""
    mine, theirs = matched(a, b)
    there = {theirs.get(path, path): lazy.fqn for path, lazy in b.other.items()}
    ours = {lazy.fqn: mine.get(path, path) for path, lazy in a.other.items()}
    return {fqn: there[path] for fqn, path in ours.items() if path in there}


def _key_at(path: Path) -> int:
    """How many segments name a module's extra state; 0: it is none."""
    at = state_at(path)
    return 0 if at is None else at + 1


def optimizer_pairs(a: Checkpoint, b: Checkpoint) -> Iterator[Pair]:
    """Values by path of both, to be held against each other: of the same groups, of the same
    parameter's state, and of what lies beside both."""
    mine, others = a.optimizer_groups, b.optimizer_groups
    for number, other in _group_pairs(mine, others):
        head = (OPTIMIZER, GROUPS, str(number))
        yield _settings(head, mine[number]), _settings(head, others[other]), len(head) + 1
    theirs = b.optimizer_values
    for fqn, values in a.optimizer_values.items():
        if fqn in theirs:
            yield _values(fqn, values), _values(fqn, theirs[fqn]), 2
    yield _rest(a), _rest(b), 2


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


def _kept(
    ckpt: Checkpoint, names: Mapping[Path, Path], dropped: Container[str] = ()
) -> dict[Path, object]:
    held = {**ckpt.plain, **dict.fromkeys(ckpt.other, TENSOR)}
    return {
        names.get(path, path): value for path, value in held.items() if join(path) not in dropped
    }


def _settings(head: Path, group: Mapping[str, Any]) -> dict[Path, Any]:
    return {
        (*head, name): _read(value)
        for name, value in group.items()
        if name not in (PARAMS, NAMES) and not isinstance(value, Mapping)
    }


def _read(value: object) -> object:
    """A hyper-parameter that is kept as a tensor, as a number."""
    if isinstance(value, LazyTensor):
        return value.read().tolist() if value.info.numel <= FEW else None
    return value


def _values(fqn: str, values: Mapping[str, object]) -> dict[Path, object]:
    return {(OPTIMIZER, f"{fqn}.{name}"): value for name, value in values.items()}


def _rest(ckpt: Checkpoint) -> dict[Path, object]:
    rest = ckpt.optimizer_reader.named().rest if ckpt.optimizer_reader.present else {}
    return {
        (OPTIMIZER, *path): value
        for path, value in rest.items()
        if not isinstance(value, LazyTensor)
    }
