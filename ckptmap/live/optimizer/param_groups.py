"""Set the hyper-parameters of a live optimizer to those of the checkpoint.

A value keeps the type of the live one: `lr` stays a tensor for torchao, a number for bitsandbytes. Only what a run itself
has made a tensor, as steps and schedulers of some classes do, comes back as it was saved, to the class that saved it.
Choices of implementation (foreach, fused, ...) are not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptmap.core.formatting import some
from ckptmap.live.model.values_in_memory import expanded
from ckptmap.live.optimizer.algorithms import algorithm, by_live_names, settings_without_live_name
from ckptmap.live.optimizer.family import OptimizerParam
from ckptmap.live.optimizer.group_objects import is_object
from ckptmap.live.optimizer.local_state import ParamOwner
from ckptmap.live.optimizer.setting_values import (
    NO_TENSOR,
    as_read,
    form_of,
    in_live_type,
    is_same,
    plain,
)
from ckptmap.storage.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import ParamGroup

CHOICES = (
    "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "amsgrad",
    "centered",
)  # fmt: skip
"""No hyper-parameters: how the optimizer computes, or which variant it is."""
NAMES = ("params", "param_names")
INITIAL = "initial_lr"
"""Key that a scheduler puts into a group, and starts from."""
_ABSENT = object()


StoredGroup: TypeAlias = Mapping[str, Any]
"""A parameter group of a checkpoint: hyper-parameters by name, and `params`, a list of FQNs."""


class ParamGroups:
    """The live parameter groups, matched with the checkpoint's by the parameters in them."""

    def __init__(
        self,
        owners: Sequence[ParamOwner],
        stored: Sequence[StoredGroup],
        state: Mapping[str, Mapping[str, object]],
        empty: tuple[Sequence[ParamGroup], Sequence[StoredGroup]] = ((), ()),
        of_same_class: Callable[[OptimizerParam], bool] = lambda part: False,
    ) -> None:
        """`state` is the checkpoint's by FQN: its entries identify the algorithm of a group. `empty` are
        the live groups without parameters, and the checkpoint's for them. `of_same_class` tells whether the class of a parameter's
        optimizer saved it."""
        self._of_same_class = of_same_class
        self._state = state
        self.settings: list[str] = []
        self.choices: list[str] = []
        self.inexact: list[str] = []
        self._setters: list[Callable[[], None]] = []
        self._same: set[int] = set()  # ids of groups whose optimizer's class saved the checkpoint
        # By the id of a group whose class is a library's own: what the class gives a new group.
        self._defaults: dict[int, Mapping[str, object]] = {}
        self._group_of = {fqn: group for group in stored for fqn in group["params"]}
        live: dict[int, list[ParamOwner]] = {}
        for owner in owners:
            live.setdefault(id(owner.part.group), []).append(owner)
        self._groups = [*(members[0].part.group for members in live.values()), *empty[0]]
        for number, members in enumerate(live.values()):
            self._match(number, members)
        self._match_empty(len(live), *empty)

    def betas(self, owner: ParamOwner) -> Sequence[float]:
        """Return the betas of the checkpoint's group that has the parameter; () where it has none."""
        group = self._group(owner)
        stored_betas = None if group is None else plain(group.get("betas"))
        return stored_betas if isinstance(stored_betas, list | tuple) else ()

    def why_momentum_differs(self, owner: ParamOwner) -> str:
        """Return why the checkpoint's momentum_buffer cannot be this optimizer's; empty: it can. SGD's is
        a sum of gradients, Muon's an average, RMSprop's a sum of scaled steps."""
        name, stored = "momentum_buffer", self._group(owner)
        if stored is None or name not in owner.part.family.needs(owner.part):
            return ""
        stored_kind, live_kind = self._kind(stored), self._live_kind(owner.part, (stored,))
        fits = stored_kind == live_kind or name not in self._state_names(stored)
        return "" if fits else f"{live_kind} has another {name} than the checkpoint's {stored_kind}"

    def apply(self) -> None:
        for setter in self._setters:
            setter()

    def _group(self, owner: ParamOwner) -> Mapping[str, object] | None:
        names = [name for target, _ in owner.members for name in target.known]
        return next((self._group_of[name] for name in names if name in self._group_of), None)

    def _match(self, number: int, members: Sequence[ParamOwner]) -> None:
        stored_groups = {id(g): g for owner in members if (g := self._group(owner)) is not None}
        self._note_unlisted(number, members)
        if not stored_groups:
            return
        part = members[0].part
        live = part.group
        kinds = {self._kind(group) for group in stored_groups.values()}
        if self._of_same_class(part):
            self._same.add(id(live))
            if part.family.name == "other" and not _is_of_torch(part.optimizer):
                self._defaults[id(live)] = getattr(part.optimizer, "defaults", {})
        elif kinds != {self._live_kind(part, stored_groups.values())}:
            self._keep(
                f"group {number}: kept as is, the checkpoint's are those of {', '.join(sorted(kinds))}"
            )
            return
        self._take(number, min(kinds), live, [*stored_groups.values()])

    def _keep(self, text: str) -> None:
        """Report settings that are not the checkpoint's."""
        self.settings.append(text)
        self.inexact.append(text)

    def _match_empty(
        self, first: int, live: Sequence[ParamGroup], stored: Sequence[StoredGroup]
    ) -> None:
        """Match the groups without parameters in their order; a run may add parameters to them later.
        `first` is the number of the first one in texts."""
        if len(live) != len(stored):
            have = f"the checkpoint has {len(stored)}, the optimizer {len(live)}"
            self._keep(f"groups without parameters: kept as they are, {have}")
            return
        for number, (group, saved) in enumerate(zip(live, stored, strict=True), first):
            kind, was = algorithm(group), algorithm(saved)
            if kind == was:
                self._take(number, kind, group, [saved])
            else:
                self._keep(f"group {number}: kept as is, the checkpoint's is that of {was}")

    def _take(
        self, number: int, kind: str, live: ParamGroup, stored: Sequence[StoredGroup]
    ) -> None:
        """Set the values of a live group to those of the checkpoint's groups, where these agree."""
        self.inexact += [
            f"group {number} {key}: was {was}, is {now}"
            for group in stored
            for key, was, now in _forms(live, group)
            if not self._made_by_run(live, key, group)
        ]
        stored_values = [{k: plain(v) for k, v in g.items() if k not in NAMES} for g in stored]
        values = [by_live_names(kind, group, live) for group in stored_values]
        for text in settings_without_live_name(kind, stored_values[0], live):
            self._keep(f"group {number} {text}")
        known = {key for group in values for key in group}
        self.inexact += [
            f"group {number} {key}: is {plain(live[key])}, was not there"
            for key in live
            if not (key in known or key in NAMES or key in CHOICES or is_object(live[key]))
        ]
        for key in {key: None for group in values for key in group}:
            of_groups = [group.get(key, _ABSENT) for group in values]
            if all(is_same(value, of_groups[0]) for value in of_groups):
                self._setting(number, key, live, of_groups[0], stored[0].get(key, _ABSENT))
            elif key in live or key not in (*CHOICES, INITIAL):
                all_values = ", ".join("none" if v is _ABSENT else str(v) for v in of_groups)
                kept = f"kept {plain(live[key])}" if key in live else "it is not there"
                self._keep(f"group {number} {key}: its parameters had {all_values}; {kept}")

    def _note_unlisted(self, number: int, members: Sequence[ParamOwner]) -> None:
        """Report parameters with state whose group was not saved: under pipeline parallelism DCP keeps
        the groups of one rank, which has one stage."""
        names = [target.fqn for owner in members for target, _ in owner.members
                 if any(self._state.get(name) for name in target.known)
                 and not any(name in self._group_of for name in target.known)]  # fmt: skip
        if names:
            self._keep(
                f"group {number}: what was set for {len(names)} of its parameters is not in the"
                f" checkpoint: {some(names)}"
            )

    def _kind(self, group: Mapping[str, object]) -> str:
        return algorithm(group, self._state_names(group))

    def _state_names(self, group: StoredGroup) -> Collection[str]:
        states = (self._state.get(fqn, ()) for fqn in group["params"])
        return next(filter(None, states), ())

    def _live_kind(self, part: OptimizerParam, stored: Iterable[StoredGroup]) -> str:
        """Return the algorithm of the live optimizer. An unknown one must step to show its state, which
        is done only where the checkpoint has state to compare."""
        stateful = any(self._state.get(fqn) for group in stored for fqn in group["params"])
        known = part.family.name != "other"
        return algorithm(part.group, part.family.needs(part) if known or stateful else ())

    def _setting(
        self, number: int, key: str, live: ParamGroup, value: object, stored: object
    ) -> None:
        """Set one value. `stored` is what the checkpoint has of it, where it has it by the same name."""
        title = f"group {number} {key}"
        if key in CHOICES:
            if key in live and bool(live[key]) != bool(value):
                self.choices.append(f"{title}: was {value}, is {live[key]}")
            return
        if key not in live:
            self._add(title, key, live, value, stored)
            return
        if isinstance(plain(live[key]), list | tuple) != isinstance(value, list | tuple):
            # Another hyper-parameter of the same name, or one that may be either.
            self.inexact.append(f"{title}: was {value}, is {plain(live[key])}")
            return
        value_to_set = in_live_type(live[key], _tensor(stored, value))
        if form_of(live[key]) != form_of(stored) and self._made_by_run(live, key, {key: stored}):
            value_to_set = as_read(stored)
        if not is_same(plain(value_to_set), value):
            self.inexact.append(f"{title}: was {value}, is {plain(value_to_set)}")
        if not is_same(plain(live[key]), plain(value_to_set)):
            self.settings.append(f"{title}: was {plain(live[key])} here, now {plain(value_to_set)}")
        self._setters.append(lambda: self._put(live, key, value_to_set))

    def _made_by_run(self, live: ParamGroup, key: str, stored: Mapping[str, object]) -> bool:
        """Return whether a value is a tensor in one of the groups only because a run has made it one, a step or
        a scheduler that computes it: the optimizer was built with none. torch's own optimizers do not, and one
        that is compiled or captured in a graph reads the tensor with which it was built."""
        defaults = self._defaults.get(id(live))
        if defaults is None or stored.get(key, _ABSENT) is _ABSENT:
            return False
        return NO_TENSOR in (form_of(live[key]), form_of(defaults.get(key)))

    def _add(self, title: str, key: str, live: ParamGroup, value: object, stored: object) -> None:
        """Add a value that the live group has not: a scheduler starts from `initial_lr`, and what a run has put
        into a group is read by its own code. An optimizer of another class may mean something else by the name."""
        if key == INITIAL:
            self._setters.append(lambda: live.__setitem__(key, value))
        elif id(live) in self._same and stored is not _ABSENT:
            self.settings.append(f"{title}: was not here, now {value}")
            self._setters.append(lambda: live.__setitem__(key, as_read(stored)))
        else:
            self.inexact.append(f"{title}: was {value}, is not there")

    def _put(self, group: ParamGroup, key: str, value: Any) -> None:
        """Set a value, of a tensor in place: a compiled step and a scheduler hold the object. A tensor
        that several groups share, as torch's defaults are, is replaced, or all would get the value
        of the last group."""
        import torch

        now = group[key]
        shared = any(other.get(key) is now for other in self._groups if other is not group)
        in_place = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
        if in_place and not shared and _can_be_set(now, value):
            with torch.no_grad():
                now.copy_(value)
        else:
            group[key] = value


def _is_of_torch(optimizer: object) -> bool:
    """Return whether the optimizer is one of torch.optim, or inherits from one."""
    return any(
        cls.__module__.startswith("torch.optim.") and cls.__name__ != "Optimizer"
        for cls in type(optimizer).__mro__
    )


def _tensor(stored: object, value: object) -> object:
    """Return what a checkpoint has of a value as it is where it is a tensor of several elements, or none."""
    return stored if isinstance(stored, LazyTensor) and stored.numel() != 1 else value


def _can_be_set(now: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a tensor can take the values of another in its own memory."""
    alike = (now.shape, now.dtype) == (value.shape, value.dtype)
    return alike and not (now.is_inference() or expanded(now))


def _forms(
    live: Mapping[str, object], group: Mapping[str, object]
) -> Iterator[tuple[str, str, str]]:
    """Yield the values that were a tensor and are a number, or the reverse, with what they were and are: the
    optimizer computes with a tensor in the tensor's precision."""
    for key in sorted(live.keys() & group.keys() - {*NAMES, *CHOICES}):
        was, now = form_of(group[key]), form_of(live[key])
        if was != now:
            yield key, was, now
