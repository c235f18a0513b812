"""Check a key form of optimizer state: it reads what it writes, and refuses what it cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptmap.errors import PlanError
from ckptmap.optim.state import (
    GROUPS,
    NAMES,
    PARAMS,
    KeyForm,
    Optimizer,
    StateKeys,
    StateLeaf,
    collect,
    expanded,
)
from ckptmap.tensors import Leaf, Path
from ckptmap.testing.base import expect, required

FIRST, SECOND = "layers.0.fc.weight", "größe.1.bias"
BARE = "layers.0.frozen"
"""A parameter that is in a group and has no state."""
STRANGERS: tuple[Mapping[Path, Leaf], ...] = (
    {},
    {("weight",): 1.0},
    {("layers", "0", "fc"): 1.0, ("lr",): 0.1},
    {("state",): {}},
)


def check_key_form(form: KeyForm) -> None:
    """Raise AssertionError where the form breaks its protocol.

        from ckptmap.testing import check_key_form
        check_key_form(MyKeys())

    The form must raise PlanError for state that it cannot hold. It may leave out a parameter that a group
    lists and that has no state.
    """
    with required(f"key form {form.name}"):
        expect(form.name, "a key form needs a name")
        for stranger in STRANGERS:
            expect(form.read(stranger) is None, f"{form.name}: claims {dict(stranger)}")
        _check_round_trip(form, form.name, plain())
        for case, make_optimizer in AWKWARD.items():
            try:
                form.write(make_optimizer())
            except PlanError:
                continue
            _check_round_trip(form, f"{form.name}: {case}", make_optimizer())


def plain() -> Optimizer:
    """Return an optimizer with two groups of different settings, two parameters with state, one without."""
    leaves = [
        StateLeaf(FIRST, ("step",), 3),
        StateLeaf(FIRST, ("exp_avg",), 0.25),
        StateLeaf(SECOND, ("step",), 4),
    ]
    groups = [
        {"lr": 0.1, "betas": [0.9, 0.99], PARAMS: [FIRST, BARE]},
        {"lr": 0.2, "betas": [0.9, 0.99], PARAMS: [SECOND]},
    ]
    return Optimizer(leaves, groups)


def _nested() -> Optimizer:
    optimizer = plain()
    return Optimizer([*optimizer.leaves, StateLeaf(FIRST, ("inner", "codes"), 7)], optimizer.groups)


def _of_no_group() -> Optimizer:
    optimizer = plain()
    return Optimizer([*optimizer.leaves, StateLeaf("lost.weight", ("step",), 5)], optimizer.groups)


def _without_state() -> Optimizer:
    return Optimizer((), plain().groups)


AWKWARD: Mapping[str, Callable[[], Optimizer]] = {
    "nested state": _nested,
    "state of a parameter in no group": _of_no_group,
    "groups without state": _without_state,
}


def _check_round_trip(form: KeyForm, name: str, optimizer: Optimizer) -> None:
    written = form.write(optimizer)
    expect(form.write(optimizer) == written, f"{name}: writes otherwise when asked again")
    leaves: dict[Path, Any] = dict(written)
    expect(len(leaves) == len(written), f"{name}: writes two values to one path")
    expanded_leaves = expanded(leaves)
    keys = form.read(expanded_leaves)
    expect(keys is not None, f"{name}: does not read what it has written")
    assert keys is not None
    _check_keys(name, expanded_leaves, keys)
    read_back = collect(expanded_leaves, keys, lambda path, leaf: leaf)
    read_back = read_back.named(_names(name, read_back, keys))
    _compare(name, read_back, optimizer)


def _check_keys(name: str, leaves: Mapping[Path, object], keys: StateKeys) -> None:
    """Check that each leaf is state, a setting or a group's list of parameters, and only one of them."""
    assigned = [*keys.state, *keys.hyper, *keys.rest]
    expect(len(assigned) == len(set(assigned)), f"{name}: a leaf is two things")
    lists = {path for path in leaves if path[0] == GROUPS and path[-1] == PARAMS}
    unassigned = [
        p for p in leaves if p not in assigned and p not in lists and leaves[p] not in ({}, [])
    ]
    expect(not unassigned, f"{name}: {unassigned[:1]} is accounted for nowhere")
    expect(not keys.rest, f"{name}: does not know its own {list(keys.rest)[:1]}")


def _names(name: str, optimizer: Optimizer, keys: StateKeys) -> dict[str, str]:
    if not keys.by_index:
        return {key: key for key in optimizer.keys}
    expect(
        all(NAMES in group for group in optimizer.groups),
        f"{name}: written by index without the names",
    )
    return {
        key: fqn
        for group in optimizer.groups
        for key, fqn in zip(group[PARAMS], group[NAMES], strict=True)
    }


def _compare(name: str, optimizer: Optimizer, expected: Optimizer) -> None:
    state, expected_state = _state(optimizer), _state(expected)
    expect(
        state == expected_state, f"{name}: reads the state {state}, written was {expected_state}"
    )
    groups, expected_groups = _groups(optimizer), _groups(expected)
    expect(
        groups == expected_groups,
        f"{name}: reads the groups {groups}, written were {expected_groups}",
    )


def _state(optimizer: Optimizer) -> dict[tuple[str, Path], object]:
    return {(leaf.key, tuple(leaf.name)): leaf.value for leaf in optimizer.leaves if leaf.name}


def _groups(optimizer: Optimizer) -> list[dict[str, object]]:
    return [{k: v for k, v in group.items() if k != NAMES} for group in optimizer.groups]
