"""Threads that fill tensors on a device side by side.

One thread copies some 4 GB/s from the page cache to pinned memory and compares checksums on the way; the
link of a GPU takes 50 GB/s. So several threads fill one tensor each. Where the model is on the CPU one
thread does it: the copy from the page cache is the last one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ckptmap.storage.pinned_memory import copies_pinned
from ckptmap.storage.process_guards import one_torch_thread

if TYPE_CHECKING:
    import torch

MOST = 16
LEAST_NBYTES = 4 << 20
"""Bytes of buffers that a thread needs: with less, each copy costs more than the bytes it moves."""
AHEAD = 2
"""Tensors for each thread that are begun before the first of them is taken."""

T = TypeVar("T")


def count_for(devices: Sequence[torch.device], max_memory: int) -> int:
    """Return how many threads fill tensors on these devices with `max_memory` bytes of buffers together."""
    if not any(map(copies_pinned, devices)):
        return 1
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    cores = len(os.sched_getaffinity(0)) // local_ranks
    return max(1, min(MOST, cores, max_memory // LEAST_NBYTES))


def in_order(
    jobs: Sequence[Callable[[], T]], threads: int, devices: Sequence[torch.device]
) -> Iterator[T]:
    """Yield what each job returns, in their order; the jobs run by `threads` threads, as the caller would
    run them: without gradients, on the caller's streams.

    A job that raises ends the iteration with its error, and jobs that have not begun never run.
    """
    streams = [torch_module(device).current_stream(device) for device in devices]

    def begin() -> None:
        for device, stream in zip(devices, streams, strict=True):
            torch_module(device).set_stream(stream)

    # The threads use the cores; those of torch would come on top of them, in each.
    with one_torch_thread(True), ThreadPoolExecutor(threads, "ckptmap-load", begin) as pool:
        begun, left = deque[Future[T]](), iter(jobs)
        try:
            for job in left:
                begun.append(pool.submit(_without_gradients, job))
                if len(begun) > AHEAD * threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()


def torch_module(device: torch.device) -> Any:
    """Return torch's module for devices of this type: `torch.cuda`."""
    import torch

    return torch.get_device_module(device)


def _without_gradients(job: Callable[[], T]) -> T:
    import torch

    with torch.no_grad():  # a thread begins with gradients
        return job()
