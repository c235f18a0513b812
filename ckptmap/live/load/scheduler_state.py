"""The state of the scheduler in a checkpoint, under the names that programs give it, for the live one.

extra.scheduler                   that of rank 0, or of all
extra.ckptmap.schedulers.rank3    that of rank 3, where ranks differ: the rates in it go by the groups of its optimizer
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmap.core.formatting import some
from ckptmap.errors import LoadError
from ckptmap.live.model import integer_keys
from ckptmap.live.optimizer import rank_settings, run_settings
from ckptmap.live.optimizer.param_groups import INITIAL
from ckptmap.live.optimizer.setting_values import in_live_type
from ckptmap.live.optimizer.several_optimizers import (
    SeveralSchedulers,
    inside,
    scheduler_classes,
)

if TYPE_CHECKING:
    from ckptmap.live.optimizer.optimizer_types import Scheduler

SCHEDULERS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
"""Keys under which programs save a scheduler's state, that of `ckptmap.save` first."""
LISTED = "lr_schedulers"
"""Lightning's key, which holds a list of scheduler states; a list of one is loaded."""
RATES = ("base_lrs", "_last_lr")
"""What torch's schedulers keep for each group of their optimizer; the groups have it, too."""


class SchedulerState:
    """The state that the live scheduler takes; no state and no scheduler are possible, too.

    of_others  the names of what is another rank's in it, and cannot be told by the groups; "" in it: rates are, too
    """

    def __init__(
        self, scheduler: Scheduler | None, state: Mapping[str, object], saved: object,
        of_others: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._live, self._state, self._saved, self._of_others = scheduler, state, saved, of_others

    @classmethod
    def of(
        cls, everything: dict[str, object], scheduler: Scheduler | None,
        settings: Mapping[str, object], own: str,
    ) -> SchedulerState:  # fmt: skip
        """Remove the state from the extra values of a checkpoint.

        settings  that it records
        own       name of this rank, where as many ranks as now have saved; else ""
        """
        by_rank = pop_dict(everything, run_settings.SCHEDULERS)
        state: object = pop_scheduler_state(everything, scheduler)
        of_others: list[str] = []
        if own in by_rank:
            state = by_rank[own]
        elif by_rank:
            of_others = ["", *_unlike([*by_rank.values()])]
        taken: Mapping[str, Any] = integer_keys.restored_below(
            state if isinstance(state, Mapping) else {}
        )
        # A list of one scheduler is the scheduler.
        listed = isinstance(scheduler, SeveralSchedulers) and [*scheduler.by_name] == ["0"]
        if rank_settings.GROUPS in settings or listed or [*taken] == ["0"]:
            taken = _for_as_many(taken, scheduler)
        return cls(scheduler, taken, settings.get(run_settings.SCHEDULER), of_others)

    def refuse(self) -> None:
        """Raise LoadError CKM508 for a state that is another scheduler's."""
        if self._live is not None and self._state:
            _refuse_other_scheduler(self._live, self._state)

    def reasons(self) -> Iterator[str]:
        """Yield why the scheduler would not go on as it would have."""
        if self._state and self._live is None:
            yield "there is a scheduler in the checkpoint, and none was given"
        elif not self._state and self._live is not None:
            yield "there is no scheduler in the checkpoint"
        elif self._live is not None:
            yield from _not_in_either("scheduler", self._live, self._state)
            now = scheduler_classes(self._live)
            if self._saved is not None and repr(_the_one(self._saved)) != repr(_the_one(now)):
                yield f"scheduler: was {self._saved}, is {now}"
            for name in filter(None, self._of_others):
                yield f"scheduler: each rank had its own {name}, that of rank 0 is taken"

    def load(self) -> None:
        """Set the scheduler to its state, after the groups are loaded."""
        if self._live is not None and self._state:
            _load_scheduler(self._live, self._state)
            _take_rates(self._live, bool(self._of_others))


def _the_one(classes: object) -> object:
    """Return the classes in a list of one scheduler as those of the scheduler."""
    is_one = isinstance(classes, Mapping) and [*classes] == ["0"]
    return classes["0"] if is_one and isinstance(classes, Mapping) else classes


def _unlike(states: Sequence[object]) -> list[str]:
    """Return the names of what differs between states, but for the rates of groups."""
    first = states[0]
    if not all(isinstance(one, Mapping) for one in states) or not isinstance(first, Mapping):
        return []
    names = {
        str(name)
        for one in states
        if isinstance(one, Mapping)
        for name in {**first, **one}
        if name not in RATES and repr(one.get(name)) != repr(first.get(name))
    }
    return sorted(names)


def _for_as_many(state: Mapping[str, Any], scheduler: Scheduler | None) -> Mapping[str, Any]:
    """Return the state for a rank that has several schedulers, one for each of its parts of the model, where one was
    saved, or the reverse."""
    of_several = bool(state) and all(
        name.isdecimal() and isinstance(one, Mapping) for name, one in state.items()
    )
    if isinstance(scheduler, SeveralSchedulers):
        one = state.get("0", {}) if of_several else state
        return (
            {name: one for name in scheduler.by_name}
            if state.keys() != scheduler.by_name.keys()
            else state
        )
    first: Mapping[str, Any] = state["0"] if of_several and scheduler is not None else state
    return first


def _take_rates(scheduler: object, anew: bool) -> None:
    """Give torch's schedulers the rates of their optimizer's groups, where those that were saved are of other groups."""
    if isinstance(scheduler, SeveralSchedulers):
        for named in scheduler.by_name.values():
            _take_rates(named, anew)
        return
    for one in inside(scheduler):
        _take_rates(one, anew)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    rates = getattr(scheduler, RATES[0], None)
    if isinstance(groups, list) and isinstance(rates, list) and (anew or len(rates) != len(groups)):
        for name, key in zip(RATES, (INITIAL, "lr"), strict=True):
            now = [copy.deepcopy(group.get(key, group["lr"])) for group in groups]
            setattr(scheduler, name, now)


def pop_dict(everything: dict[str, object], name: str) -> Mapping[str, object]:
    """Remove and return the dict `name`; another value of that name stays, and {} is returned."""
    found = everything.get(name)
    if not isinstance(found, Mapping):
        return {}
    del everything[name]
    return found


def pop_scheduler_state(
    everything: dict[str, object], scheduler: Scheduler | None
) -> Mapping[str, object]:
    """Remove and return the scheduler's state: at the root, the one of a list, those of a list where as many
    schedulers are given, or inside of the only dict that has such a key, as verl's `extra_state`."""
    found = next((name for name in SCHEDULERS if name in everything), SCHEDULERS[0])
    several = [*scheduler.by_name] if isinstance(scheduler, SeveralSchedulers) else []
    state = pop_dict(everything, found) or _pop_list(everything, LISTED, several)
    inside = [
        (key, value, name)
        for key, value in everything.items()
        if isinstance(value, Mapping)
        for name in SCHEDULERS
        if isinstance(value.get(name), Mapping)
    ]
    if state or len(inside) != 1:
        return state
    ((key, outer, name),) = inside
    rest: dict[str, Mapping[str, object]] = dict(outer)
    state = rest.pop(name)
    del everything[key]
    if rest:
        everything[key] = rest
    return state


def _pop_list(
    everything: dict[str, object], name: str, several: Sequence[str]
) -> Mapping[str, object]:
    """Remove the list `name` and return the one dict that it holds, or the dicts by the names of `several`, of
    which there are as many; any other list stays, and {} is returned."""
    match everything.get(name):
        case [Mapping() as found] if not several:
            del everything[name]
            return found
        case [*states] if several and len(states) == len(several):
            del everything[name]
            return dict(zip(several, states, strict=True))
    return {}


def _not_in_either(title: str, scheduler: Scheduler, state: Mapping[str, object]) -> list[str]:
    """Return a phrase for every scheduler whose state has other names than the saved one: it is another."""
    if isinstance(scheduler, SeveralSchedulers):
        return [
            phrase
            for name, one in scheduler.by_name.items()
            if isinstance(saved := state.get(name), Mapping)
            for phrase in _not_in_either(f"{title} {name!r}", one, saved)
        ]
    names = _not_in_both(scheduler, state)
    return [f"{title}: not in both states: {', '.join(names)}"] if names else []


def _not_in_both(scheduler: Scheduler, state: Mapping[str, object]) -> list[str]:
    return sorted(map(str, state.keys() ^ scheduler.state_dict().keys()))


def _refuse_other_scheduler(scheduler: Scheduler, state: Mapping[str, object]) -> None:
    """Raise LoadError CKM508 for a state that is another's: one of several, or of others by name. torch
    would take it, and not look at it."""
    names = scheduler.state_dict().keys()
    is_one = not isinstance(scheduler, SeveralSchedulers)
    if (names & state.keys() or not names) if is_one else names == state.keys():
        return
    raise LoadError(
        "CKM508",
        f"scheduler: the saved state has {some(sorted(map(str, state)))}, expected"
        f" {some(sorted(map(str, names)))}",
        "give the schedulers that were saved, by the same names, or load without one",
    )


def _load_scheduler(scheduler: Scheduler, state: Mapping[str, object]) -> None:
    """Set a scheduler to its saved state, each value in the type of the live one.

    Raises LoadError CKM508 where it is another scheduler's."""
    live = scheduler.state_dict()
    new_state = {k: in_live_type(live.get(k), value, padded=False) for k, value in state.items()}
    strange = _not_in_both(scheduler, state)
    try:
        scheduler.load_state_dict(new_state)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise LoadError(
            "CKM508",
            f"{type(scheduler).__name__} cannot take the saved scheduler's state: {error!r}"
            f" (not in both: {', '.join(strange) or 'nothing'})",
            "build the scheduler that was saved, or load without one",
        ) from error
