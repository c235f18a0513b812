"""Threads that fill tensors on a device side by side.

One thread copies some 4 GB/s from the page cache to pinned memory and compares checksums on the way; the
link of a GPU takes 50 GB/s. So several threads fill one tensor each. Where the model is on the CPU one
thread does it: the copy from the page cache is the last one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ckptmap.live.model.reader_memory import ReaderMemory
from ckptmap.storage import device_copies
from ckptmap.storage.crew import Crew
from ckptmap.storage.pinned_memory import copies_pinned
from ckptmap.storage.process_guards import one_torch_thread

if TYPE_CHECKING:
    import torch

MOST = 16
LEAST_NBYTES = 16 << 20
"""Bytes of buffers that a thread needs: with smaller blocks, threads wait for each other more than for the bytes."""
LEAST_WORK = 128 << 20
"""Bytes that a thread must have to fill: it costs a millisecond or two to give it buffers and take them back."""

T = TypeVar("T")


def count_for(devices: Sequence[torch.device], max_memory: int) -> int:
    """Return how many threads fill tensors on these devices with `max_memory` bytes of buffers together."""
    if not any(map(copies_pinned, devices)):
        return 1
    local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    cores = len(os.sched_getaffinity(0)) // local_ranks
    return max(1, min(MOST, cores, max_memory // LEAST_NBYTES))


def that_pay(count: int, nbytes: Sequence[int], shared: bool = False) -> int:
    """Return how many of `count` threads have enough to do where tensors of `nbytes` each are filled.

    Without help, more than all bytes by the largest would wait for the one that fills the largest.

    shared  threads help each other to fill large tensors
    """
    total, largest = sum(nbytes), max(nbytes, default=0)
    most = count if shared else total // max(1, largest)
    return max(1, min(count, total // LEAST_WORK, most))


class ReaderThreads:
    """Threads that keep their pinned blocks from one call of `in_order` to the next, until `close`.

    They work as the thread that made this one would: without gradients, on its streams of `devices`. One that has
    nothing left to do helps another one to fill a large tensor.

    memory  the blocks that are made for all threads; others are made where a thread needs them
    """

    def __init__(self, count: int, devices: Sequence[torch.device], memory: ReaderMemory) -> None:
        self.count = count
        self._memory = memory
        streams = [_module(device).current_stream(device) for device in devices]
        self._lent = {device: list(blocks) for device, blocks in memory.blocks().items()}
        crew = Crew(lambda call: self._pool.submit(_without_gradients, call))

        def begin() -> None:
            for device, stream in zip(devices, streams, strict=True):
                _module(device).set_stream(stream)
            for device, blocks in self._lent.items():
                way = device_copies.lanes(device)
                assert way is not None
                way.lend("up", blocks.pop())
                way.crew = crew

        self._pool = ThreadPoolExecutor(count, "ckptmap-load", begin)

    def in_order(self, jobs: Sequence[Callable[[], T]], nbytes: Sequence[int] = ()) -> Iterator[T]:
        """Yield what each job returns, in their order.

        A job that raises ends the iteration with its error, and jobs that have not begun never run.

        nbytes  the bytes that each moves: jobs begin with the largest, so that all threads end together
        """
        first = (
            sorted(range(len(jobs)), key=nbytes.__getitem__, reverse=True)
            if nbytes
            else range(len(jobs))
        )
        # The threads use the cores; those of torch would come on top of them, in each.
        with one_torch_thread(True):
            begun = {at: self._pool.submit(_without_gradients, jobs[at]) for at in first}
            try:
                for at in range(len(jobs)):
                    yield begun[at].result()
            finally:
                for future in begun.values():
                    future.cancel()

    def close(self) -> None:
        """Wait for the jobs that have begun and their copies, and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._lent.clear()
        self._memory.give_back()


def _module(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)


def _without_gradients(job: Callable[[], T]) -> T:
    import torch

    with torch.no_grad():  # a thread begins with gradients
        return job()
