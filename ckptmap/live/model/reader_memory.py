"""The pinned blocks of threads that fill tensors on devices.

    planning of a load  |  reading        |  the caller goes on
    made in a thread    |  lent to threads|  given back in a thread

To make 256 MiB takes a tenth of the time in which these fill 13 GB, and to give them back nearly as long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.storage import device_copies
from ckptmap.storage.device_copies import Blocks
from ckptmap.storage.pinned_memory import copies_pinned, wait_for
from ckptmap.storage.registered_memory import let_go

if TYPE_CHECKING:
    import torch

_giving_back: list[threading.Thread] = []
"""Threads that give memory back. Who makes some waits for them: both together would be more than a caller allows."""


class ReaderMemory:
    """Blocks for `count` threads and each of their devices, all of one device in one memory.

    A thread begins to make them at once; `blocks` waits for it.
    """

    def __init__(self, devices: Sequence[torch.device], count: int, block_nbytes: int) -> None:
        self.count, self.block_nbytes = count, block_nbytes
        self._devices = [device for device in devices if copies_pinned(device)]
        self._memory: list[torch.Tensor] = []
        self._blocks: dict[torch.device, list[Blocks]] = {}
        self._error: BaseException | None = None
        self._thread = _in_thread(self._make)

    def _make(self) -> None:
        try:
            wait_for(_giving_back)
            for device in self._devices:
                memory, blocks = device_copies.one_memory(self.count, self.block_nbytes)
                self._memory.append(memory)
                self._blocks[device] = blocks
        except BaseException as error:  # `blocks` raises it
            self._error = error

    def blocks(self) -> Mapping[torch.device, Sequence[Blocks]]:
        """Return the blocks of each device, one for each thread. Raises what making them has raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._blocks

    def give_back(self) -> None:
        """Give the memory back, in a thread, once the copies from it have ended. Nobody uses the blocks any more."""
        if self._thread is not None:
            self._thread.join()
        for blocks in self._blocks.values():
            for one in blocks:
                one.wait()
        self._blocks.clear()
        held, self._memory = self._memory, []
        if held:
            thread = _in_thread(lambda: _drop(held))
            if thread is not None:
                _giving_back.append(thread)


def _drop(held: list[torch.Tensor]) -> None:
    for memory in held:
        let_go(memory)
    held.clear()


def _in_thread(call: Callable[[], None]) -> threading.Thread | None:
    """Start a thread for the call; call it here, and return None, where the system gives no thread."""
    thread = threading.Thread(target=call, name="ckptmap-load-memory")
    try:
        thread.start()
    except RuntimeError:
        call()
        return None
    return thread
