"""torchdata's StatefulDataLoader in a run that goes on: it draws what it would have drawn without the stop.

    a run that went on    [iter: seed] batch batch batch ...                  one draw when the epoch began
    a resumed one         [iter: seed] batch | [iter: seed] batch batch ...   a second one for the same epoch

The seed comes from torch's random stream, or from the loader's `generator=`, which a shuffling sampler shares and
whose state torchdata does not save. Every later value of that stream would be another one: dropout, the next
epoch's order. So the first iterator that a loaded loader makes gives back what it has drawn. That is at the caller's
`iter()` and no earlier: it may call `sampler.set_epoch()` or change the data set between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.live.model import rng_state, worker_streams

if TYPE_CHECKING:
    import torch

GENERATOR = "ckptmap.generator"
"""Key, in the saved state of a loader, of its generator's state; None: it had no generator."""
FINISHED = "_iterator_finished"
"""torchdata's key that says whether the epoch was at its end."""
STATE_KEYS = ("_snapshot", "_num_yielded")
"""torchdata's keys of the position, with worker processes and without, beside `FINISHED`."""
MAKER = "_get_iterator"
"""Method of torch's and torchdata's loaders that makes an iterator; `__iter__` calls it."""


def loader_of(one: object) -> Any:
    """Return the loader of torch's class that this object is, or that accelerate has wrapped; None: it is none."""
    inner = vars(one).get("base_dataloader", one) if hasattr(one, "__dict__") else one
    return inner if _is_a(inner, "torch.utils.data", "DataLoader") else None


def _is_a(one: object, package: str, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.startswith(package) for cls in type(one).__mro__
    )


def can_hold(loader: object) -> bool:
    """Return whether it is known when this loader draws, so that it can be given back."""
    return _is_a(loader, "torchdata.", "StatefulDataLoader") and callable(
        getattr(loader, MAKER, None)
    )


def with_generator(one: object, state: object) -> object:
    """Return the state of an object; that of a loader with the state of its generator."""
    loader = loader_of(one)
    if loader is None or not isinstance(state, Mapping) or not state:
        return state
    generator = getattr(loader, "generator", None)
    return {**state, GENERATOR: None if generator is None else generator.get_state()}


def without_generator(state: Any) -> Any:
    """Return a saved state as its object takes it."""
    if not isinstance(state, Mapping) or GENERATOR not in state:
        return state
    return {key: value for key, value in state.items() if key != GENERATOR}


def hold_streams(title: str, one: object, state: object, exact: bool) -> None:
    """Let the next iterator of a loader that was given `state` move no random stream."""
    loader = loader_of(one)
    if loader is None or not can_hold(loader) or not isinstance(state, Mapping):
        return
    drawn = state.get(GENERATOR)
    finished = is_finished(state, loader)
    lost = exact and worker_streams.are_lost(state, loader, finished)
    setattr(loader, MAKER, FirstIterator(title, loader, drawn, exact and not finished, lost))


class FirstIterator:
    """Makes the first iterator of a loader in the place of the loader's own method, and then leaves.

    generator   the state of the loader's generator when it was saved; None: it had none, or none is known
    is_ordered  is a sampler refused that draws its order now, in the middle of an epoch?
    is_watched  are rows refused that draw random numbers in worker processes?
    """

    def __init__(
        self, title: str, loader: Any, generator: torch.Tensor | None, is_ordered: bool,
        is_watched: bool = False,
    ) -> None:  # fmt: skip
        self.title = title
        self.loader = loader
        self.generator = generator
        self.is_ordered = is_ordered
        self.is_watched = is_watched

    def __call__(self) -> object:
        loader, before = self.loader, rng_state.captured()
        vars(loader).pop(MAKER, None)
        try:
            made = self._made()
            if self.is_ordered:
                self._refuse_another_order(before)
        finally:
            rng_state.restore(before)
            if self.generator is not None and loader.generator is not None:
                loader.generator.set_state(self.generator)
        return made

    def _made(self) -> object:
        if not self.is_watched:
            made: object = getattr(self.loader, MAKER)()
            return made
        with worker_streams.watched(self.loader) as watch:
            made = getattr(self.loader, MAKER)()
        worker_streams.refuse_moved(self.title, made, watch)
        return made

    def _refuse_another_order(self, before: Mapping[str, Any]) -> None:
        """Raise LoadError CKM507 where more than the seed was drawn: a sampler has made its order anew."""
        import torch
        from torch.utils.data import IterableDataset

        if isinstance(self.loader.dataset, IterableDataset):
            return  # its samples may be drawn to find the position; they are not used
        after: Mapping[str, Any] = rng_state.captured()
        torch.set_rng_state(before["cpu"])
        if self.loader.generator is None:
            torch.empty((), dtype=torch.int64).random_()
        is_seed = torch.equal(torch.get_rng_state(), after["cpu"])
        if is_seed and all(after[name] == before[name] for name in ("python", "numpy")):
            return
        raise LoadError(
            "CKM507",
            f"{self.title}: its sampler, {_sampler_text(self.loader)}, has drawn its order anew from the random"
            " streams, in the middle of an epoch: the batches are not those that were left",
            "give the sampler a state_dict() and load_state_dict(), or save at the end of an epoch",
        )


def is_finished(state: Mapping[Any, Any], loader: Any) -> bool:
    """Return whether a loader had no batch left in its epoch."""
    if state.get(FINISHED):
        return True
    snapshot = state.get("_snapshot")
    with contextlib.suppress(TypeError):  # a data set without a length
        if isinstance(snapshot, Mapping):
            done = snapshot.get("_snapshot_step", 0) + state.get("_steps_since_snapshot", 0)
        else:
            done = state.get("_num_yielded", 0)
        return bool(done >= len(loader))
    return False


def drawing(title: str, one: object, state: object) -> str:
    """Return what draws a seed from torch's random stream that is not given back; empty: nothing is known to."""
    loader = loader_of(one)
    if loader is None and any(True for _ in places(state)):
        return (
            f"{title} holds the state of a StatefulDataLoader, whose next iter() may draw a seed from torch's"
            " random stream: save and load the loader itself as stateful="
        )
    if loader is not None and not can_hold(loader) and loader.generator is None:
        return (
            f"{title}: the next iter() of this {type(loader).__name__} draws a seed from torch's random stream:"
            " give it a generator= of its own, in both runs"
        )
    return ""


def reasons(title: str, one: object, state: object) -> Iterator[str]:
    """Yield why the batches are not those that were left, where this object is a loader."""
    loader = loader_of(one)
    if loader is None or not can_hold(loader):
        return
    state = state if isinstance(state, Mapping) else {}
    yield from _generator_reasons(title, loader, state)
    yield from _sampler_reasons(title, loader, state)


def _generator_reasons(title: str, loader: Any, state: Mapping[Any, Any]) -> Iterator[str]:
    has = loader.generator is not None
    if GENERATOR in state:
        if (had := state[GENERATOR] is not None) != has:
            had_text, has_text = (("a" if any_ else "no") for any_ in (had, has))
            yield f"{title}: had {had_text} generator= of its own, and has {has_text} one now"
    elif has and _shares_generator(loader) and not loader.num_workers:
        yield (
            f"{title}: no state of its generator= is recorded, from which the next epoch's order is drawn: save"
            " the loader as stateful="
        )


def _shares_generator(loader: Any) -> bool:
    return any(getattr(one, "generator", None) is loader.generator for one in _samplers(loader))


def _sampler_reasons(title: str, loader: Any, state: Mapping[Any, Any]) -> Iterator[str]:
    """Yield that a sampler of torch's own draws its order, of which nothing is saved."""
    from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

    for sampler in _samplers(loader):
        draw = type(sampler).__iter__  # a subclass may seed itself by the epoch's number
        if draw not in [
            cls.__iter__ for cls in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
        ]:
            continue
        if sampler.generator is None and is_finished(state, loader):
            continue  # the next order is drawn from a stream that is restored
        yield (
            f"{title}: the order of torch's {type(sampler).__name__} is not saved: use shuffle=True without a"
            " sampler=, or torchdata.stateful_dataloader.sampler.RandomSampler, in both runs"
        )


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield the loader's samplers, from the outermost one inwards."""
    one = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = getattr(one, "sampler", None) or getattr(one, "batch_sampler", None)


def _sampler_text(loader: Any) -> str:
    *_, last = _samplers(loader)
    return f"a {type(last).__name__}"


def places(values: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (keys, state) of the loaders' states inside nested values."""
    if isinstance(values, Mapping):
        if FINISHED in values and any(key in values for key in STATE_KEYS):
            yield path, values
            return
        for key, value in values.items():
            yield from places(value, (*path, str(key)))
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from places(value, (*path, str(number)))


def drawing_in_extra(values: object) -> Iterator[str]:
    """Yield which states of loaders the caller will give to loaders that are not known here, and which may draw a
    seed from torch's random stream then. `values` are those of `extra` or `extra_per_rank`."""
    for path, _ in places(values):
        yield (
            f"{_title(path)} is the state of a StatefulDataLoader that load was not given, and whose next iter()"
            f" may draw a seed from torch's random stream: {_next_step(path)}"
        )


def reasons_in_extra(values: object) -> Iterator[str]:
    """Yield which of these loaders may yield other batches in the next epoch."""
    for path, state in places(values):
        if "_num_yielded" in state and _has_generator(
            state
        ):  # worker processes: torchdata draws twice
            yield (
                f"{_title(path)} is the state of a StatefulDataLoader that load was not given: where its generator="
                f" is its own, the next epoch's order is another: {_next_step(path)}"
            )


def _title(path: Sequence[str]) -> str:
    return "extra" + "".join(f"[{key!r}]" for key in path)


def _next_step(path: Sequence[str]) -> str:
    where = "load" if len(path) == 1 else "save and load"
    return f"give the loader to {where}, as stateful={{{path[-1] if path else 'loader'!r}: loader}}"


def _has_generator(state: object) -> bool:
    if isinstance(state, Mapping):
        return "generator" in state or any(map(_has_generator, state.values()))
    return False
