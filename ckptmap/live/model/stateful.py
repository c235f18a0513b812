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
from ckptmap.live.model import integer_keys
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
        if not all(callable(getattr(one, m, None)) for m in ("state_dict", "load_state_dict")):
            raise ArgumentError(
                "CKM516",
                f"stateful[{name!r}]: is a {type(one).__name__}, expected an object with state_dict()"
                " and load_state_dict()",
                "pass plain values as extra=, or extra_per_rank=",
            )


def states_of(objects: Mapping[str, Stateful] | None) -> dict[str, object]:
    """Return the state of every object. Raises ArgumentError CKM516 for one that cannot be saved."""
    check(objects)
    found = {name: one.state_dict() for name, one in (objects or {}).items()}
    return argument_checks.extra(found, (), KEY)


def drawing_notes(objects: Mapping[str, Stateful] | None) -> list[str]:
    """Return notes of data loaders that draw from torch's random stream when their next iterator is made: a run
    that was not stopped has its iterator already, and other random numbers after it."""
    return [
        f"stateful[{name!r}]: the next iter() of it draws a seed from torch's random stream, which is restored; where"
        " the model draws from it too, give the loader a generator= of its own, in both runs"
        for name, one in (objects or {}).items()
        if any(cls.__name__ == "DataLoader" for cls in type(one).__mro__)
        and getattr(one, "generator", None) is None
    ]


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
    """

    def __init__(self, saved: Mapping[str, Any], rank: str) -> None:
        own = saved.get(rank) if rank else None
        self._states: dict[str, Any] = {**saved.get(SHARED, {}), **(own or {})}
        others = {name for theirs in saved.values() for name in theirs}
        self._of_other_ranks = others - self._states.keys()

    def refuse(self, objects: Mapping[str, Stateful] | None, path: str, strict: bool) -> None:
        """Raise ArgumentError CKM516 for objects that are none, LoadError CKM519 for one without a
        state if `strict`."""
        check(objects)
        missing = [name for name in objects or {} if name not in self._states]
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
        known = ", ".join(map(repr, sorted(self._states))) or "none"
        raise LoadError(
            "CKM519",
            f"{path}: has no state of {name!r}, expected one of {known}",
            "leave it out of stateful=, or load with strict=False",
        )

    def unused(self, objects: Mapping[str, Stateful] | None) -> list[str]:
        """Return the names that the checkpoint has and nobody takes."""
        return sorted({*self._states, *self._of_other_ranks} - {*(objects or {})})

    def absent(self, objects: Mapping[str, Stateful] | None) -> list[str]:
        """Return the names of objects that keep the state they have."""
        return [name for name in objects or {} if name not in self._states]

    def load(self, objects: Mapping[str, Stateful] | None, read: Any) -> None:
        """Give every object its state; `read` reads the tensors in it."""
        for name, one in (objects or {}).items():
            if name not in self._states:
                continue
            state = read(self._states[name])
            try:
                one.load_state_dict(state)
            except Exception as error:
                raise LoadError(
                    "CKM519",
                    f"stateful[{name!r}]: {type(one).__name__} cannot take its saved state: {error!r}",
                    "build the object that was saved, or leave it out of stateful=",
                ) from error
