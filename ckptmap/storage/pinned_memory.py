"""Host memory for the copies that a save or a conversion makes: pinned for copies to and from a device, so that
these need not block the host, and pageable for copies of what is on the CPU."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ckptmap.core.formatting import human
from ckptmap.storage.registered_memory import let_go, registered_memory

if TYPE_CHECKING:
    import torch

_refusals: list[str] = []
"""Why the system refused to pin memory; it is warned of once."""
_ALIGN = 64
_kept: dict[bool, Sequence[torch.Tensor]] = {}
"""The slabs of the last save, pinned (True) or not, where no save uses them."""
_MOST = 1.5
"""Slabs that are kept are used for other sizes up to this multiple of what new ones would be."""
_reserving: list[threading.Thread] = []
"""The threads that make memory for the first save."""
PAGEABLE, PINNED = "ckptmap-memory", "ckptmap-pinned-memory"
"""Names of these threads, by the kind of memory that they make."""
AHEAD_THREADS = 4
"""Threads that touch pages of pinned memory which is made ahead: training goes on beside them."""
AHEAD_SHARE = 0.5
"""Of the memory that the system has left: no more than this is pinned ahead by all processes of a machine. Pinned
memory cannot be swapped out, and until the save it is of no use."""
_MEMORY, _LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
"""What the machine has, and the limit of this container."""


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return new host memory, pinned where the system allows it, else pageable.

    A copy to pageable memory gives the same bytes, and blocks the host. The first refusal is a
    RuntimeWarning.
    """
    import torch

    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        # After host memory is really used up, this raises, too.
        memory = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        _refusals.append(str(error).partition("\n")[0])
        if len(_refusals) == 1:
            warnings.warn(
                f"{human(memory.nbytes)} of host memory could not be pinned ({_refusals[0]}):"
                " pageable memory is used, and copies from and to the device are slower",
                RuntimeWarning,
                stacklevel=2,
            )
        return memory


def lasting_memory(nbytes: int) -> torch.Tensor:
    """Return new host memory, u8, for many copies: pinned as `host_memory` is, and made faster where it is large."""
    import torch

    registered = registered_memory(nbytes)
    return host_memory((nbytes,), torch.uint8) if registered is None else registered


def copies_pinned(device: torch.device) -> bool:
    """Return whether copies between pinned memory and the device need not block the host."""
    import torch

    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "Stream")


@dataclass(frozen=True)
class Slabs:
    """Host memory for many tensors at once, kept from one save to the next.

    To pin memory for each tensor would block a save for seconds; pageable memory costs a page fault for each
    4 KiB when it is new. The allocator of pinned memory rounds up to powers of two, so the slabs have
    such sizes.

    sizes  bytes of each tensor
    where  slab of each tensor, and offset there
    """

    slabs: Sequence[torch.Tensor]
    sizes: Sequence[int]
    where: Sequence[tuple[int, int]]
    pinned: bool

    def place(self, number: int) -> torch.Tensor:
        """Return the memory of one tensor, u8."""
        slab, offset = self.where[number]
        return self.slabs[slab].narrow(0, offset, self.sizes[number])

    def address(self, number: int) -> int:
        """Return the address of that memory."""
        slab, offset = self.where[number]
        return self._addresses[slab] + offset

    @cached_property
    def _addresses(self) -> list[int]:
        return [slab.data_ptr() for slab in self.slabs]

    @classmethod
    def take(cls, sizes: Sequence[int], pinned: bool) -> Slabs:
        """Return places of `sizes` bytes each: in the slabs that were given back as far as these fit."""
        if not sizes:
            return cls((), (), (), pinned)
        wait_for(_reserving)
        new = lasting_memory if pinned else _pageable
        asked = tuple(sizes)
        wanted, where = slab_layout(asked)
        slabs = list(_kept.pop(pinned, ()))
        kept = tuple(slab.numel() for slab in slabs)
        if kept != wanted:
            more, around = _around(asked, kept)
            if sum(slab.numel() for slab in slabs) + sum(more) > _MOST * sum(wanted):
                _free(slabs)  # before others are taken
            else:
                wanted, where = more, around
            slabs += [new(nbytes) for nbytes in wanted]
        return cls(slabs, asked, where, pinned)

    def give_back(self) -> None:
        """Keep the slabs for those who take some next; the values in them are no longer needed."""
        if self.slabs:
            _kept[self.pinned] = self.slabs


def reserve_pageable(sizes: Sequence[int]) -> None:
    """Begin to make memory for the copies of the first save, in a thread: the system gives new memory page by
    page, which takes as long as three copies. A save waits for the thread."""
    if _kept.get(False) or any(one.name == PAGEABLE for one in _reserving) or not sum(sizes):
        return

    def reserve() -> None:
        made = [_pageable(nbytes) for nbytes in slab_layout(sizes)[0]]
        for slab in made:
            slab[:: mmap.PAGESIZE].zero_()
        _kept[False] = made

    _begin(reserve, PAGEABLE)


def reserve_pinned(sizes: Sequence[int]) -> None:
    """Begin to make pinned memory for the copies of the first save, in a thread, as `reserve_pageable` does: a
    gigabyte takes a quarter of a second, and more by the thread alone.

    Nothing is made where the system refuses it, or has too little left: the save asks again, and says so.
    """
    if _kept.get(True) or any(one.name == PINNED for one in _reserving) or not sum(sizes):
        return
    wanted = slab_layout(sizes)[0]
    if sum(wanted) > _most_ahead():
        return

    def reserve() -> None:
        made: list[torch.Tensor] = []
        for nbytes in wanted:
            slab = _pinned_ahead(nbytes)
            if slab is None:
                return
            made.append(slab)
        _kept[True] = made

    _begin(reserve, PINNED)


def _begin(reserve: Callable[[], None], name: str) -> None:
    """Make memory in a thread. Where the system gives none, the save makes its memory itself."""
    thread = threading.Thread(target=reserve, name=name)
    with suppress(RuntimeError):
        thread.start()
        _reserving.append(thread)  # by now a save may wait for it


def give_back_pinned() -> None:
    """Give the pinned memory back that is kept for the next save; no save is under way."""
    wait_for(_reserving)
    _free(list(_kept.pop(True, ())))


def wait_for(threads: list[threading.Thread]) -> None:
    """Wait until all these threads have ended, and take them off the list. Others may wait for them, too: nobody goes on
    before a thread that somebody else waits for has ended."""
    for thread in tuple(threads):
        thread.join()
        with suppress(ValueError):  # another one has taken it off
            threads.remove(thread)


def _free(slabs: list[torch.Tensor]) -> None:
    """Give slabs back to the system that were kept: the copies that used them have ended."""
    for slab in slabs:
        let_go(slab)
    slabs.clear()


def _pinned_ahead(nbytes: int) -> torch.Tensor | None:
    """Return new pinned memory; None, and no warning, where the system refuses it."""
    import torch

    try:
        registered = registered_memory(nbytes, AHEAD_THREADS)
        if registered is not None:
            return registered
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except (RuntimeError, MemoryError):
        return None


def _most_ahead() -> int:
    """Return how many bytes this process may pin ahead: its share of what the machine has left."""
    try:
        lines = _MEMORY.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        left = int(line.split()[1]) * 1024
        local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    except (OSError, ValueError, StopIteration):
        return 0
    with suppress(OSError, ValueError):  # no limit is "max"
        left = min(left, int(_LIMIT.read_text()))
    return int(left * AHEAD_SHARE) // local_ranks


def _pageable(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


SlabLayout: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]


def slab_layout(sizes: Sequence[int]) -> SlabLayout:
    """Return the bytes of each slab, powers of two, and the slab and offset of each size in order.

    Large sizes come first. Each slab is the largest that what is left fills, or just large enough for
    one size that is larger.
    """
    return _slab_layout(tuple(sizes))


@lru_cache(maxsize=4)
def _slab_layout(sizes: tuple[int, ...]) -> SlabLayout:
    """Do so once for all saves of one run."""
    padded = [-(-nbytes // _ALIGN) * _ALIGN for nbytes in sizes]
    slabs: list[int] = []
    where = [(0, 0)] * len(sizes)
    left, used = sum(padded), 0
    for at in sorted(range(len(sizes)), key=padded.__getitem__, reverse=True):
        nbytes = padded[at]
        if not slabs or used + nbytes > slabs[-1]:
            fills = 1 << (max(left, _ALIGN).bit_length() - 1)
            slabs.append(max(fills, 1 << max(nbytes - 1, 0).bit_length()))
            used = 0
        where[at] = len(slabs) - 1, used
        used, left = used + nbytes, left - nbytes
    return tuple(slabs), tuple(where)


@lru_cache(maxsize=4)
def _around(sizes: tuple[int, ...], kept: tuple[int, ...]) -> SlabLayout:
    """Return the bytes of slabs that are needed beside the kept ones, and the slab and offset of each size in
    order, where the kept ones come first."""
    where = [(-1, 0)] * len(sizes)
    used = [0] * len(kept)
    for at in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        padded = -(-sizes[at] // _ALIGN) * _ALIGN
        slab = next((n for n, free in enumerate(kept) if used[n] + padded <= free), -1)
        if slab >= 0:
            where[at] = slab, used[slab]
            used[slab] += padded
    rest = [at for at, (slab, _) in enumerate(where) if slab < 0]
    more, places = slab_layout([sizes[at] for at in rest])
    for at, (slab, offset) in zip(rest, places, strict=True):
        where[at] = len(kept) + slab, offset
    return more, tuple(where)
