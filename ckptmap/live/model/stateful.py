"""The caller's objects with `state_dict` and `load_state_dict` (torch's Stateful) in a checkpoint.

extra.stateful.shared.NAME    a state that is the same on all ranks: a gradient scaler
extra.stateful.rank3.NAME     that of rank 3, where ranks differ: its data loader, its sampler
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core import argument_checks
from ckptmap.core.state_paths import nest
from ckptmap.errors import ArgumentError, LoadError
from ckptmap.live.model import data_loaders, integer_keys
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.storage.lazy_tensor import LazyTensor

KEY = "stateful"
"""Key of these states among the extra values."""
SHARED = "shared"


class Stateful(Protocol):
    """What torch.distributed.checkpoint calls Stateful: data loaders, gradient scalers, samplers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def check(objects: object) -> None:
    """Raise ArgumentError CKM516 for what is no dict of such objects by name."""
    if objects is None:
        return
    if not isinstance(objects, Mapping) or not all(isinstance(name, str) for name in objects):
        raise ArgumentError(
            "CKM516",
            f"stateful: is a {type(objects).__name__}, expected objects by name",
            'for example stateful={"loader": loader}',
        )
    for name, one in objects.items():
        methods = (getattr(one, name, None) for name in ("state_dict", "load_state_dict"))
        if isinstance(one, type) or not all(map(callable, methods)):
            raise ArgumentError(
                "CKM516",
                f"stateful[{name!r}]: is a {type(one).__name__}, expected an object with state_dict()"
                " and load_state_dict()",
                "pass plain values as extra=, or extra_per_rank=",
            )


def states_of(objects: Mapping[str, Stateful] | None) -> dict[str, object]:
    """Return the state of every object. Raises ArgumentError CKM516 for one that cannot be saved."""
    check(objects)
    found = {
        name: data_loaders.with_generator(one, one.state_dict())
        for name, one in (objects or {}).items()
    }
    return argument_checks.extra(found, (), KEY)


def shared_names(digests_of: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """Return the names whose state is the same on all ranks, by the digests of every rank."""
    first = digests_of[0]
    return frozenset(
        name for name in first if all(theirs.get(name) == first[name] for theirs in digests_of)
    )


def state_of(ckpt: Checkpoint, name: str) -> object:
    """Return the state that an object of this name had on this rank, or on all; None: there is none.

    That of a rank is returned where as many ranks as now have saved."""
    rank, world = rank_and_world()
    values = {**ckpt.plain, **ckpt.other}
    heads = [
        (KEY, SHARED, name),
        *([(KEY, f"rank{rank}", name)] if ckpt.world_size == world else []),
    ]
    for head in heads:
        inside = {path[3:]: value for path, value in values.items() if path[:3] == head}
        if () in inside:
            return inside[()]
        if inside:
            read = {p: v.read() if isinstance(v, LazyTensor) else v for p, v in inside.items()}
            return integer_keys.restored_below(nest(read))
    return None


class SavedStates:
    """The states of a checkpoint for the objects of this rank.

    saved   what the checkpoint has under `KEY`
    rank    number of this rank; "" where as many ranks as now did not save it
    extra   the caller's values, `extra_per_rank` last: a state that was saved there by the object's name is taken, too
    """

    def __init__(
        self, saved: Mapping[str, Any], rank: str, extra: Sequence[Mapping[str, object]] = ()
    ) -> None:
        own = saved.get(rank) if rank else None
        self._states: dict[str, Any] = {**saved.get(SHARED, {}), **(own or {})}
        others = {name for theirs in saved.values() for name in theirs}
        self._of_other_ranks = others - self._states.keys()
        self._extra = {
            name: value
            for values in extra
            for name, value in values.items()
            if isinstance(value, Mapping) and name not in others
        }

    def _has(self, name: str) -> bool:
        return name in self._states or name in self._extra

    def refuse(self, objects: Mapping[str, Stateful] | None, path: str, strict: bool) -> None:
        """Raise ArgumentError CKM516 for objects that are none, LoadError CKM519 for one without a
        state if `strict`."""
        check(objects)
        missing = [name for name in objects or {} if not self._has(name)]
        if not missing or not strict:
            return
        name = missing[0]
        if name in self._of_other_ranks:
            raise LoadError(
                "CKM519",
                f"{path}: the state of {name!r} differs between ranks, and another number of ranks"
                " saved it",
                "load with as many ranks, or leave it out of stateful= and set it up anew",
            )
        known = ", ".join(map(repr, sorted(self._states)))
        raise LoadError(
            "CKM519",
            f"{path}: has no state of {name!r}, {f'expected one of {known}' if known else 'nor of any other object'}",
            "leave it out of stateful=, or load with strict=False",
        )

    def unused(self, objects: Mapping[str, Stateful] | None) -> list[str]:
        """Return the names that the checkpoint has and nobody takes."""
        return sorted({*self._states, *self._of_other_ranks} - {*(objects or {})})

    def absent(self, objects: Mapping[str, Stateful] | None) -> list[str]:
        """Return the names of objects that keep the state they have."""
        return [name for name in objects or {} if not self._has(name)]

    def judged(
        self, objects: Mapping[str, Stateful] | None, draws: str
    ) -> tuple[list[str], list[str]]:
        """Return why a run with the loaders among the objects and the extra values does not go on bit for bit,
        and notes of where it may not. `draws` says what draws from torch's random stream beside them."""
        given = [
            (f"stateful[{name!r}]", one, self._state(name)) for name, one in self._given(objects)
        ]
        rest = {name: v for name, v in self._extra.items() if name not in (objects or {})}
        reasons = [text for one in given for text in data_loaders.reasons(*one)]
        drawing = [text for one in given if (text := data_loaders.drawing(*one))]
        in_extra = [*data_loaders.drawing_in_extra(rest)]
        if draws:
            drawing += in_extra
            return [*reasons, *(f"{text}; {draws} draws from it, too" for text in drawing)], []
        reasons += data_loaders.reasons_in_extra(rest)
        if all(data_loaders.loader_of(one) is None for _, one, _ in given):
            drawing += in_extra  # who gives loaders has no need to be told of that
        return reasons, [f"{text}; it matters if the model draws from it, too" for text in drawing]

    def _given(self, objects: Mapping[str, Stateful] | None) -> list[tuple[str, Stateful]]:
        return [(name, one) for name, one in (objects or {}).items() if self._has(name)]

    def _state(self, name: str) -> Any:
        return self._states[name] if name in self._states else self._extra[name]

    def load(self, objects: Mapping[str, Stateful] | None, read: Any, exact: bool) -> None:
        """Give every object its state; `read` reads the tensors in it."""
        for name, one in self._given(objects):
            state, title = read(self._state(name)), f"stateful[{name!r}]"
            try:
                one.load_state_dict(data_loaders.without_generator(state))
            except Exception as error:
                raise LoadError(
                    "CKM519",
                    f"{title}: {type(one).__name__} cannot take its saved state: {error!r}",
                    "build the object that was saved, or leave it out of stateful=",
                ) from error
            data_loaders.hold_streams(title, one, state, exact)
