"""Parameter groups of a live optimizer as values that a checkpoint holds: `params` by FQN.

A value that is no plain one, such as a function, is left out and told of: no checkpoint of ckptmap holds
pickled objects, and the live optimizer of the next run brings its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptmap.core.state_paths import ListIndex
from ckptmap.errors import LoadError
from ckptmap.live.model.plain_values import simplified
from ckptmap.live.model.tuples import holds_tensor
from ckptmap.live.optimizer.group_objects import is_object, python_numbers
from ckptmap.live.optimizer.local_state import HeldGroup, ParamOwner
from ckptmap.live.optimizer.unwrap import groups_of, several_of
from ckptmap.live.save.extra_values import require_plain

GROUPS = ("optimizer", "param_groups")
"""Where groups are stored."""
LEFT_OUT = ("params", "param_names")


def groups(owners: Sequence[ParamOwner], optimizer: object) -> list[HeldGroup]:
    """Return the parameter groups in order: hyper-parameters, and `params` by FQN. A group may have no
    parameters: those that a run adds later go into it.

    optimizer  `unwrapped`, whose parameters the owners are

    Raises LoadError CKM508 for tensors that are kept by parameter, ArgumentError CKM516 for one that is no plain
    tensor."""
    for owner in _one_of_each_group(owners):
        _refuse_unnamed(owner, owner.part.group)
    named: dict[int, list[str]] = {}
    for owner in owners:
        names = named.setdefault(id(owner.part.group), [])
        names += [target.fqn for target, _ in owner.members]
    found = []
    for part, (name, one) in enumerate(_each_by_name(optimizer)):
        title = f"{name} {type(one).__name__}"
        for at, group in enumerate(groups_of(one)):
            kept = {k: v for k, v in group.items() if k not in LEFT_OUT and not is_object(v)}
            values = {k: _kept(at, k, v) for k, v in kept.items()}
            found.append(HeldGroup(title, part, at, values, named.get(id(group), [])))
    return found


def _each_by_name(optimizer: object) -> list[tuple[str, object]]:
    """Return an optimizer, or each of several, with its name. Those of a list have none: another rank, with other
    parts of the model, may have others at the same place."""
    several = several_of(optimizer)
    if not several:
        return [("", optimizer)]
    return [("" if name.isdecimal() else name, one) for name, one in several.items()]


def _kept(at: int, name: str, value: object) -> object:
    """Return a value of a group as it is now: nothing that happens to the live one reaches it."""
    import torch

    if isinstance(value, torch.Tensor):
        require_plain((*GROUPS, ListIndex(at), name), value)
        return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
    if not holds_tensor(value):
        return simplified(python_numbers(value))
    if isinstance(value, Mapping):
        return {key: _kept(at, f"{name}.{key}", item) for key, item in value.items()}
    assert isinstance(value, list | tuple), "a tensor is held by one of them"
    items = [_kept(at, f"{name}.{number}", item) for number, item in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)


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
