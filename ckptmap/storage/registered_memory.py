"""Large host memory that CUDA may copy to and from while the host goes on: pages first, registered then.

    shared anonymous memory -> touched by several threads -> cudaHostRegister

It is shared, so that a forked worker of a data loader has the same pages: of private ones a write after the fork makes a
copy, while CUDA goes on with the old page. A system that gives shared memory huge pages (`shmem_enabled`) does so here.

`cudaHostAlloc`, by which torch makes pinned memory, asks the system for one page after the other in one
thread: 2.6 GB/s on the machine of `benchmarks/RESULTS_PARTS.md`, where this gives 4.4 GB/s. torch shares the state dicts of its own
checkpoints so (torch 2.13, torch/distributed/_state_dict_utils.py, `_create_cpu_state_dict`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    import torch

LEAST_NBYTES = 4 << 20
"""Smaller memory comes from torch's allocator, which keeps what is given back."""
PIECE_NBYTES = 16 << 20
"""Bytes that a thread touches at a time."""
MOST_THREADS = 16
PORTABLE = 1
"""cudaHostRegisterPortable: the memory counts as pinned for every device, not only for the current one."""
RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


class _Registered(mmap.mmap):
    """Anonymous memory that CUDA has been told of, until nobody refers to it."""

    address = 0
    is_idle = False
    """Whether it is known that no copy from or to the memory is under way."""

    def __del__(self) -> None:
        if not self.address:
            return
        # A process that ends has no CUDA any more; the system takes its memory back.
        with contextlib.suppress(Exception):
            if self._is_unregistered():
                COUNT.add(-len(self))
            else:
                _kept.append(self)

    def _is_unregistered(self) -> bool:
        """Wait for copies from and to the memory, and tell CUDA that it goes; return whether CUDA knows."""
        try:
            with on_used_device(), beside_captures():
                if not self.is_idle:
                    _end_copies()
                return _succeeds(_cudart().cudaHostUnregister(self.address))
        except (
            Exception
        ):  # a device that had an error, or one that captures a graph, cannot be waited for
            return False


_kept: list[_Registered] = []
"""Memory that CUDA would not let go. It stays mapped: CUDA takes whatever comes to its addresses for the old pages,
which it goes on to copy from and to."""


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


COUNT = RegisteredCount()
"""Of this process."""
_by_address: WeakValueDictionary[int, _Registered] = WeakValueDictionary()


def let_go(memory: torch.Tensor) -> None:
    """State that no copy from or to all of this memory is under way, nor will be: it is given back without waiting for
    the devices. Nothing where it is not registered."""
    held = _by_address.get(memory.data_ptr())
    if held is not None:
        held.is_idle = True


def registered_memory(nbytes: int, most_threads: int = MOST_THREADS) -> torch.Tensor | None:
    """Return `nbytes` of new memory, u8, that counts as pinned; None where CUDA does not take it, or
    is not what this torch has. `most_threads` touch its pages at a time."""
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
    _touch(values, most_threads)
    address = values.data_ptr()
    with on_used_device(), beside_captures():
        if not _succeeds(_cudart().cudaHostRegister(address, nbytes, PORTABLE)):
            return None
    memory.address = address
    _by_address[address] = memory
    COUNT.add(nbytes)
    return values


@contextlib.contextmanager
def on_used_device() -> Iterator[None]:
    """Make a device current that this process uses already, while the context lasts.

    A new thread begins with device 0. A call of CUDA there would take some 500 MB of its memory, though the
    process may use device 3 alone.
    """
    index = _used_device()
    if index is None:
        yield
        return
    with _torch().cuda.device(index):
        yield


def _used_device() -> int | None:
    """Return the current device if the process uses it, else the first that it uses; None: it uses none."""
    made: Any = _torch()
    count = made.cuda.device_count()
    if not count:
        return None
    used = [index for index in range(count) if made._C._cuda_hasPrimaryContext(index)]
    current = made.cuda.current_device() if used else 0
    return current if current in used else next(iter(used), None)


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let calls of this thread pass while another one captures a CUDA graph, while the context lasts.

    In CUDA's mode "global", which is torch's, a call that changes memory fails while any thread captures,
    and ends that capture. torch's own pinned memory is made in the mode "relaxed", too.
    """
    exchange = _function("cudaThreadExchangeStreamCaptureMode")
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(RELAXED)
    failed = exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if not failed:
            exchange(ctypes.byref(mode))  # it has the mode of before


def _succeeds(answer: Any) -> bool:
    """Return whether a call of CUDA did what it was asked for.

    CUDA keeps an error as the last one of the thread, torch asks for it after each kernel, and the binding of torch
    does not take it away: the next kernel would be said to have failed.
    """
    if not int(answer):
        return True
    take = _function("cudaGetLastError")
    if take is not None:
        take()
    return False


def _function(name: str) -> Any:
    """Return a function of CUDA's library that torch has no binding for; None where the library has another name than
    in torch's own builds."""
    version = _torch().version.cuda
    if not version:
        return None
    try:
        library = ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}", mode=os.RTLD_NOLOAD)
        return getattr(library, name)
    except (OSError, AttributeError):
        return None


def _touch(values: torch.Tensor, most_threads: int) -> None:
    """Make the system give every page of the memory."""
    starts = range(0, values.numel(), PIECE_NBYTES)
    threads = min(most_threads, len(os.sched_getaffinity(0)), len(starts))
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
