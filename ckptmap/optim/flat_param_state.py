"""Prepare optimizer state for FSDP1, which shards state as it shards its flat parameters.

With `use_orig_params=False` a flat parameter is the optimizer's one parameter: one step count for
all that lies in it, and one set of hyper-parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ckptmap.errors import PlanError
from ckptmap.optim.state import PARAMS, Optimizer, Same, StateLeaf
from ckptmap.protocols import FlatUnit
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path

UnitOf = Callable[[str], FlatUnit | None]
_APART = (
    "both lie in one flat parameter, which has a single value: add --use-orig-params, so that each"
    " parameter has state of its own, or leave the optimizer behind with --optimizer drop"
)


def flatten_by_unit(
    optimizer: Optimizer, unit_of: UnitOf, weights: Mapping[str, LazyTensor]
) -> Optimizer:
    """Return the state with one step count a flat parameter; the others must equal it (`same`).

    Raises PlanError CKM504 where FSDP1 cannot hold state of such a shape, or parameters of one unit
    differ in dtype, in plain values or in their group.
    """
    leaves: list[StateLeaf] = []
    same = list(optimizer.same)
    first_of_unit: dict[tuple[str, Path], StateLeaf] = {}
    for leaf in optimizer.leaves:
        unit = unit_of(leaf.key)
        if unit is None or not leaf.name:
            leaves.append(leaf)
            continue
        vector = _is_vector(leaf, weights[leaf.key].shape)
        earlier = None if unit.named else first_of_unit.setdefault((unit.prefix, leaf.name), leaf)
        if earlier is None or earlier is leaf:
            leaves.append(leaf)
            continue
        _check_equal_state(earlier, leaf, unit)
        if vector:
            leaves.append(leaf)
        elif isinstance(leaf.value, LazyTensor):
            assert isinstance(earlier.value, LazyTensor), "both are of one kind"
            same.append(Same(earlier.value, leaf.value, _APART))
    _check_groups(optimizer, unit_of)
    return replace(optimizer, leaves=leaves, same=same)


def _is_vector(leaf: StateLeaf, shape: tuple[int, ...]) -> bool:
    """Return whether the state is cut as its weight is; a scalar is not.

    Raises PlanError CKM504 for state of another shape.
    """
    value = leaf.value
    if not isinstance(value, LazyTensor) or value.shape == ():
        return False
    if value.shape != shape:
        raise PlanError(
            "CKM504",
            f"{value.fqn}: has shape {list(value.shape)}, expected its weight's, {list(shape)}: FSDP1"
            " cuts state as it cuts the weight",
            "leave the optimizer behind with --optimizer drop",
        )
    return True


def _check_equal_state(first: StateLeaf, second: StateLeaf, unit: FlatUnit) -> None:
    if _kind(first.value) != _kind(second.value):
        raise PlanError(
            "CKM504",
            f"{second.key}: its optimizer state {second.title} is {_kind(second.value)}, but"
            f" {_kind(first.value)} for {first.key}, in one flat parameter (FSDP unit {unit.prefix!r})",
            "add --use-orig-params, so that each parameter has state of its own",
        )


def _kind(value: object) -> str:
    """Return a text that is equal for state that one flat parameter can hold: of tensors the dtype and
    whether they are scalars, of other values the value."""
    if isinstance(value, LazyTensor):
        return f"a {value.dtype} {'tensor' if value.shape else 'scalar'}"
    return repr(value)


def _check_groups(optimizer: Optimizer, unit_of: UnitOf) -> None:
    group_of: dict[str, tuple[int, str]] = {}
    for number, group in enumerate(optimizer.groups):
        for fqn in group[PARAMS]:
            unit = unit_of(fqn)
            if unit is None or unit.named:
                continue
            number_of_unit, first = group_of.setdefault(unit.prefix, (number, fqn))
            if number_of_unit != number:
                raise PlanError(
                    "CKM504",
                    f"{fqn}: is in parameter group {number}, but {first} of the same flat parameter (FSDP"
                    f" unit {unit.prefix!r}) is in group {number_of_unit}",
                    "add --use-orig-params, so that a unit may have parameters of several groups, or leave"
                    " the optimizer behind with --optimizer drop",
                )
