"""Random streams of the worker processes of a data loader, of which nothing is saved in the middle of an epoch.

    the run that went on    worker: [seed] row row | row row     a row may draw: crops, noise
    a resumed one           worker: [seed]         | row row     the same seed, and other numbers

So a resumed run is the same only where its rows draw nothing. Workers are asked: the first one whose streams have
moved says so to the process that trains, which refuses the batch.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.live.model import rng_state

if TYPE_CHECKING:
    import torch

NEXT = "_next_data"
"""Method of torch's and torchdata's iterators that returns the next batch."""
_begun: dict[str, object] = {}
"""In a worker: its streams as they were before its first batch."""


def are_lost(state: Mapping[Any, Any], loader: Any, is_finished: bool) -> bool:
    """Return whether workers had streams, when a loader was saved in this state, with which the next batches would
    have been made. A data set that keeps its own state keeps them, too; an iterable one begins anew and is read up
    to the position."""
    from torch.utils.data import IterableDataset

    snapshot = state.get("_snapshot")
    if not isinstance(snapshot, Mapping) or not loader.num_workers:
        return False
    rows = loader.dataset
    if isinstance(rows, IterableDataset) or callable(getattr(rows, "load_state_dict", None)):
        return False
    done = snapshot.get("_snapshot_step", 0) + state.get("_steps_since_snapshot", 0)
    return bool(loader.persistent_workers if is_finished else done)


@dataclass
class WatchedWorkers:
    """Stands for the functions of a loader that its workers call, and sees whether their streams move."""

    collate: Callable[[Any], Any]
    begin: Callable[[int], object] | None
    moved: torch.Tensor = field(default_factory=lambda: _shared_flag())

    def __call__(self, rows: Any) -> Any:
        if _begun and not self.moved and _has_moved():
            self.moved.fill_(1)
        return self.collate(rows)

    def started(self, worker: int) -> None:
        if self.begin is not None:
            self.begin(worker)
        _begun.update(_streams())


def _shared_flag() -> torch.Tensor:
    import torch

    flag = torch.zeros((), dtype=torch.uint8)
    flag.share_memory_()  # type: ignore[no-untyped-call]
    return flag


def _streams() -> dict[str, object]:
    import torch

    return {
        "torch": (torch.initial_seed(), torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": rng_state.numpy_state(),
    }


def _has_moved() -> bool:
    """Return whether a stream is not as it was; one of torch that a row has seeded itself does not count."""
    import torch

    now: dict[str, Any] = _streams()
    (seed, was), (own, is_now) = _begun["torch"], now["torch"]  # type: ignore[misc]
    if seed == own and not torch.equal(was, is_now):  # type: ignore[has-type]
        return True
    return any(now[name] != _begun[name] for name in ("python", "numpy"))


@contextmanager
def watched(loader: Any) -> Iterator[WatchedWorkers]:
    """Let the workers that are started in the context tell whether their streams move."""
    watch = WatchedWorkers(loader.collate_fn, loader.worker_init_fn)
    own = vars(loader)
    own |= {"collate_fn": watch, "worker_init_fn": watch.started}
    try:
        yield watch
    finally:
        own |= {"collate_fn": watch.collate, "worker_init_fn": watch.begin}


def refuse_moved(title: str, made: Any, watch: WatchedWorkers) -> None:
    """Let an iterator raise LoadError CKM507 in place of a batch once a worker's streams have moved."""
    iterator, next_batch = weakref.ref(made), getattr(type(made), NEXT)

    def checked() -> object:
        batch: object = next_batch(iterator())
        if watch.moved:
            raise LoadError(
                "CKM507",
                f"{title}: rows of its data set draw random numbers in worker processes, whose streams are not saved:"
                " the batches are not those that were left",
                "give the data set a state_dict() and load_state_dict() with the states of these streams, save at"
                " the end of an epoch without persistent_workers=True, or load without exact=True",
            )
        return batch

    setattr(made, NEXT, checked)
