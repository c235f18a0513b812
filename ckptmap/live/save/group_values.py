"""Parameter groups of a live optimizer as values that a checkpoint holds: `params` by FQN.

A value that is no plain one, such as a function, is left out and told of: no checkpoint of ckptmap holds
pickled objects, and the live optimizer of the next run brings its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptmap.errors import LoadError
from ckptmap.live.model.tuples import holds_tensor
from ckptmap.live.optimizer.group_objects import is_object, python_numbers
from ckptmap.live.optimizer.local_state import ParamOwner
from ckptmap.live.optimizer.optimizer_types import ParamGroup
from ckptmap.live.optimizer.unwrap import groups_of

LEFT_OUT = ("params", "param_names")


def groups(owners: Sequence[ParamOwner], optimizer: object) -> list[ParamGroup]:
    """Return the parameter groups in order: hyper-parameters, and `params` by FQN. A group may have no
    parameters: those that a run adds later go into it.

    optimizer  `unwrapped`, whose parameters the owners are

    Raises LoadError CKM508 for tensors that are kept by parameter."""
    found: dict[int, ParamGroup] = {}
    for owner in _one_of_each_group(owners):
        _refuse_unnamed(owner, owner.part.group)
    for group in groups_of(optimizer):
        values = {
            k: python_numbers(v) for k, v in group.items() if k not in LEFT_OUT and not is_object(v)
        }
        found[id(group)] = {**values, "params": []}
    for owner in owners:
        found[id(owner.part.group)]["params"] += [target.fqn for target, _ in owner.members]
    return list(found.values())


def notes(owners: Sequence[ParamOwner]) -> list[str]:
    """Return a note for every value that is left out."""
    groups = [owner.part.group for owner in _one_of_each_group(owners)]
    return [
        f"optimizer group {number}: {name} is a {type(value).__name__}, no plain value, and is not"
        " saved; the optimizer that loads keeps its own"
        for number, group in enumerate(groups)
        for name, value in _objects(group)
    ]


def _one_of_each_group(owners: Sequence[ParamOwner]) -> list[ParamOwner]:
    """Return a parameter of each group that has any."""
    found: dict[int, ParamOwner] = {}
    for owner in owners:
        found.setdefault(id(owner.part.group), owner)
    return list(found.values())


def _objects(group: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    return ((k, v) for k, v in group.items() if k not in LEFT_OUT and is_object(v))


def _refuse_unnamed(owner: ParamOwner, group: Mapping[str, object]) -> None:
    for name, value in _objects(group):
        if holds_tensor(value):
            kind = type(owner.part.optimizer).__name__
            raise LoadError(
                "CKM508",
                f"optimizer: {kind} keeps tensors in its group's {name!r}, beside objects that have no"
                " name in a checkpoint; expected them in `state`",
                "save without the optimizer, and save its own state_dict() with torch.save",
            )
