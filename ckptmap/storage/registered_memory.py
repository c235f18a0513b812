"""Large host memory that CUDA may copy to and from while the host goes on: pages first, registered then.

    anonymous memory of huge pages -> touched by several threads -> cudaHostRegister

`cudaHostAlloc`, by which torch makes pinned memory, asks the system for one page after the other in one
thread: 2.6 GB/s on the machine of `benchmarks/RESULTS_PARTS.md`, where this gives 4.4 GB/s. torch shares the state dicts of its own
checkpoints so (torch 2.13, torch/distributed/_state_dict_utils.py, `_create_cpu_state_dict`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LEAST_NBYTES = 4 << 20
"""Smaller memory comes from torch's allocator, which keeps what is given back."""
PIECE_NBYTES = 16 << 20
"""Bytes that a thread touches at a time."""
MOST_THREADS = 16


class _Registered(mmap.mmap):
    """Anonymous memory that CUDA has been told of, until nobody refers to it."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            # A process that ends has no CUDA any more; the system takes its memory back.
            with contextlib.suppress(Exception):
                _end_copies()
                _cudart().cudaHostUnregister(self.address)
            COUNT.add(-len(self))


class RegisteredCount:
    """The bytes that are registered now, and that were at most: torch does not count them."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.RLock()  # memory may be freed inside `add`

    def add(self, nbytes: int) -> None:
        """Count bytes that were registered, or fewer than none that no longer are."""
        with self._lock:
            self.now += nbytes
            self.most = max(self.most, self.now)

    def forget_most(self) -> None:
        """Count the most from now on."""
        with self._lock:
            self.most = self.now


COUNT = RegisteredCount()
"""Of this process."""


def registered_memory(nbytes: int) -> torch.Tensor | None:
    """Return `nbytes` of new memory, u8, that counts as pinned; None where CUDA does not take it, or
    is not what this torch has."""
    import torch

    if nbytes < LEAST_NBYTES or not torch.cuda.is_available():
        return None
    try:
        memory = _Registered(-1, nbytes)
    except (OSError, ValueError, OverflowError):
        return None
    with contextlib.suppress(OSError, AttributeError):  # a kernel may have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    _touch(values)
    address = values.data_ptr()
    if int(_cudart().cudaHostRegister(address, nbytes, 0)):
        return None
    memory.address = address
    COUNT.add(nbytes)
    return values


def _touch(values: torch.Tensor) -> None:
    """Make the system give every page of the memory."""
    starts = range(0, values.numel(), PIECE_NBYTES)
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), len(starts))
    if threads == 1:
        values[:: mmap.PAGESIZE].zero_()
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: values[at : at + PIECE_NBYTES : mmap.PAGESIZE].zero_(), starts))


def _end_copies() -> None:
    """Wait for the devices that this process uses: after an error one may still copy to the memory."""
    made: Any = _torch()
    for index in range(made.cuda.device_count()):
        if made._C._cuda_hasPrimaryContext(index):
            made.cuda.synchronize(index)


def _cudart() -> Any:
    made: Any = _torch().cuda
    return made.cudart()


def _torch() -> Any:
    import torch

    return torch
