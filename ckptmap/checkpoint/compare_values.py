"""Compare the values of two checkpoints that are not tensors.

These are the training step, schedulers, hyper-parameters of the optimizer, and its step counts.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeAlias

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.module_extra_state import plain_paths, state_at
from ckptmap.core.state_paths import TENSOR, join, unequal
from ckptmap.optim.state import GROUPS, NAMES, PARAMS, ParamGroup
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path

RECORD = "ckptmap"
"""The key under which `ckptmap.save` describes the run itself: its ranks and their devices."""
OPTIMIZER = "optimizer"
FEW = 16
"""Elements of a hyper-parameter that is a tensor: a learning rate, betas."""


def unequal_values(a: Checkpoint, b: Checkpoint) -> tuple[int, dict[str, tuple[object, object]]]:
    """Return how many plain values agree, and those that differ by name.

    The description of the run itself is not compared.
    """
    count = 0
    differences: dict[str, tuple[object, object]] = {}
    a_values, b_values, depth = extra_value_pair(a, b)
    extra = _without_record(a_values), _without_record(b_values), depth
    for a_values, b_values, depth in (extra, *optimizer_pairs(a, b)):
        equal_count, unequal_pairs = unequal(a_values, b_values, depth)
        count += equal_count
        differences.update(unequal_pairs)
    return count, differences


def _without_record(values: Mapping[Path, object]) -> dict[Path, object]:
    return {path: value for path, value in values.items() if path[0] != RECORD}


Pair: TypeAlias = tuple[dict[Path, object], dict[Path, object], int]
"""Values by path of two checkpoints, and how many segments name an entry."""


def extra_value_pair(a: Checkpoint, b: Checkpoint, dropped: Container[str] = ()) -> Pair:
    """Return the values of both that are neither weights nor optimizer state.

    Extra state of modules goes by plain key. What was dropped from the first is left out.
    """
    a_paths, b_paths = match_extra_state(a, b)
    return _extra_values(a, a_paths, dropped), _extra_values(b, b_paths), 1


def match_extra_state(a: Checkpoint, b: Checkpoint) -> tuple[dict[Path, Path], dict[Path, Path]]:
    """Return the extra state of modules of both: stored path -> the path to compare it under.

    That is the plain key; where both checkpoints have the dict at the same place, paths stay.
    """
    a_plain, b_plain = (plain_paths({**c.plain, **c.other}, c.roles.model_root) for c in (a, b))
    heads = [{path[: _key_at(path)] for path in {**c.plain, **c.other}} for c in (a, b)]
    shared = heads[0] & heads[1]
    a_paths, b_paths = (
        {path: plain for path, plain in paths.items() if path[: _key_at(path)] not in shared}
        for paths in (a_plain, b_plain)
    )
    return a_paths, b_paths


def matched_extra_tensors(a: Checkpoint, b: Checkpoint) -> dict[str, str]:
    """Return the names of a's tensors beside the weights -> the names of the same tensors in b."""
    a_paths, b_paths = match_extra_state(a, b)
    b_names = {b_paths.get(path, path): lazy.fqn for path, lazy in b.other.items()}
    a_keys = {lazy.fqn: a_paths.get(path, path) for path, lazy in a.other.items()}
    return {fqn: b_names[path] for fqn, path in a_keys.items() if path in b_names}


def _key_at(path: Path) -> int:
    """Return how many segments name a module's extra state; 0: the path is of something else."""
    at = state_at(path)
    return 0 if at is None else at + 1


def optimizer_pairs(a: Checkpoint, b: Checkpoint) -> Iterator[Pair]:
    """Yield values of both to compare: those of the same parameter groups, of the same parameter's
    state, and those beside state and groups."""
    a_groups, b_groups = a.optimizer_groups, b.optimizer_groups
    for a_number, b_number in _group_pairs(a_groups, b_groups):
        head = (OPTIMIZER, GROUPS, str(a_number))
        yield (
            _hyper_parameters(head, a_groups[a_number]),
            _hyper_parameters(head, b_groups[b_number]),
            len(head) + 1,
        )
    b_values = b.optimizer_values
    for fqn, values in a.optimizer_values.items():
        if fqn in b_values:
            yield _state_values(fqn, values), _state_values(fqn, b_values[fqn]), 2
    yield _other_values(a), _other_values(b), 2


def _group_pairs(a: Sequence[ParamGroup], b: Sequence[ParamGroup]) -> list[tuple[int, int]]:
    """Return pairs of numbers of groups that share a parameter. Where no name is shared, because the
    names are of two schemes, groups of the same number pair."""
    number_of = {fqn: b_number for b_number, group in enumerate(b) for fqn in group[PARAMS]}
    pairs = [
        (a_number, b_number)
        for a_number, group in enumerate(a)
        for b_number in sorted({number_of[fqn] for fqn in group[PARAMS] if fqn in number_of})
    ]
    if not pairs and len(a) == len(b):
        return [(number, number) for number in range(len(a))]
    return pairs


def _extra_values(
    ckpt: Checkpoint, names: Mapping[Path, Path], dropped: Container[str] = ()
) -> dict[Path, object]:
    values = {**ckpt.plain, **dict.fromkeys(ckpt.other, TENSOR)}
    return {
        names.get(path, path): value for path, value in values.items() if join(path) not in dropped
    }


def _hyper_parameters(head: Path, group: Mapping[str, object]) -> dict[Path, object]:
    return {
        (*head, name): _read(value)
        for name, value in group.items()
        if name not in (PARAMS, NAMES) and not isinstance(value, Mapping)
    }


def _read(value: object) -> object:
    """Return a hyper-parameter that is stored as a tensor as a number or a list."""
    if isinstance(value, LazyTensor):
        return value.read().tolist() if value.info.numel <= FEW else None
    return value


def _state_values(fqn: str, values: Mapping[str, object]) -> dict[Path, object]:
    return {(OPTIMIZER, f"{fqn}.{name}"): value for name, value in values.items()}


def _other_values(ckpt: Checkpoint) -> dict[Path, object]:
    values = ckpt.optimizer_reader.named().rest if ckpt.optimizer_reader.present else {}
    return {
        (OPTIMIZER, *path): value
        for path, value in values.items()
        if not isinstance(value, LazyTensor)
    }
