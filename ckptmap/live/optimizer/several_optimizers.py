"""Several optimizers, or schedulers, in one call: each keeps its own parameters, whose FQNs tell all apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptmap.core import argument_checks

if TYPE_CHECKING:
    from ckptmap.live.optimizer.optimizer_types import Scheduler


@dataclass(frozen=True, eq=False)
class SeveralOptimizers:
    """Optimizers by name. No two of them may step one parameter."""

    by_name: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class SeveralSchedulers:
    """Schedulers by name as one: its state dict has those of all by name."""

    by_name: Mapping[str, Scheduler]

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.by_name.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises KeyError for a name that one side lacks."""
        if strange := state_dict.keys() ^ self.by_name.keys():
            raise KeyError(*sorted(map(str, strange)))
        for name, one in self.by_name.items():
            one.load_state_dict(state_dict[name])


def one_scheduler(scheduler: Any) -> Scheduler | None:
    """Return schedulers by name, or in a list, as one scheduler; anything else as it is."""
    if isinstance(scheduler, Mapping):
        return SeveralSchedulers(scheduler)
    if isinstance(scheduler, list | tuple):
        return SeveralSchedulers({str(number): one for number, one in enumerate(scheduler)})
    found: Scheduler | None = scheduler
    return found


def check_scheduler(scheduler: object, method: str) -> None:
    """Raise ArgumentError CKM516 for what is neither a scheduler nor several by name."""
    if not isinstance(scheduler, Mapping | list | tuple):
        argument_checks.scheduler(scheduler, method)
        return
    for one in scheduler.values() if isinstance(scheduler, Mapping) else scheduler:
        argument_checks.scheduler(one, method)


def scheduler_classes(scheduler: object) -> dict[str, object] | list[object]:
    """Return the class of a scheduler, and of those inside of it, as plain values: states of two classes may
    have the same names. Of several by name, return those of each."""
    if isinstance(scheduler, SeveralSchedulers):
        return {name: scheduler_classes(one) for name, one in scheduler.by_name.items()}
    return [type(scheduler).__name__, *map(scheduler_classes, inside(scheduler))]


def inside(scheduler: object) -> Sequence[object]:
    """Return the schedulers that one of torch's steps."""
    inner = getattr(scheduler, "_schedulers", None)
    return inner if isinstance(inner, list | tuple) else ()
