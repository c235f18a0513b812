"""Copies of what this rank writes, made while training waits, so that a save in the background has the values
of the moment at which it was called.

values on the CPU       copied at once
values on a device      the copies are started, and the thread that writes waits for their end
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

from ckptmap.core.formatting import first_line
from ckptmap.errors import RunError
from ckptmap.execution.smaller_feeds import give_back
from ckptmap.live.model.tensor_reader import is_as_it_lies
from ckptmap.storage.pinned_memory import Slabs, host_memory
from ckptmap.storage.registered_memory import beside_captures, on_used_device
from ckptmap.storage.resource_limits import SHORT
from ckptmap.tensors import Box, Path

if TYPE_CHECKING:
    import torch

ALONE_NBYTES = 1 << 17
"""Fewer bytes are copied by one thread, also where torch has several."""


class CopyEvent(Protocol):
    """The end of the copies from one device: an `Event` of the device's module in torch."""

    def synchronize(self) -> None:
        """Wait until the copies have ended."""


ValuesKey: TypeAlias = tuple[Path, Box]


class Staged(NamedTuple):
    """Values that were copied, or are being copied: their number in the memory of the copies."""

    slabs: Slabs
    number: int
    dtype: torch.dtype
    shape: torch.Size

    def values(self) -> torch.Tensor:
        """Return the copy."""
        return self.slabs.place(self.number).view(self.dtype).view(self.shape)


class StagedValues(Mapping[ValuesKey, "torch.Tensor"]):
    """Values by stored path and box. Tensors of those that were copied are made when they are asked for, after
    training goes on."""

    def __init__(self, found: Mapping[ValuesKey, torch.Tensor | Staged]) -> None:
        self._found = found

    def __getitem__(self, key: ValuesKey) -> torch.Tensor:
        found = self._found[key]
        return found.values() if isinstance(found, Staged) else found

    def __iter__(self) -> Iterator[ValuesKey]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


@dataclass(frozen=True)
class Snapshot:
    """The values that this rank writes, on the CPU. They are there after `wait`."""

    values: Mapping[ValuesKey, torch.Tensor]
    copies: Sequence[CopyEvent] = ()
    slabs: Sequence[Slabs] = ()
    """The memory of the copies, which is kept for the next save."""

    def wait(self) -> None:
        """Wait until the copies from every device have ended. Training may capture a graph meanwhile."""
        with on_used_device(), beside_captures():  # a thread that has just begun is on device 0
            for event in self.copies:
                event.synchronize()

    def release(self) -> None:
        """Let the next save use the memory of the copies again; `values` are invalid then."""
        for slabs in self.slabs:
            slabs.give_back()


def snapshot(mine: Mapping[tuple[Path, Box], torch.Tensor], copied: bool) -> Snapshot:
    """Start the copies of all values to the CPU, in row-major order.

    With `copied` values on the CPU are copied, too, since training goes on changing the live ones. A
    device that trains on changes its values only after the copies, which are on its current stream.
    """
    found: dict[ValuesKey, torch.Tensor | Staged] = {}
    apart: dict[ValuesKey, torch.Tensor] = {}
    at_once: dict[ValuesKey, torch.Tensor] = {}
    for key, live in mine.items():
        found[key] = live
        if is_copied_apart(live.device):
            apart[key] = live.detach()
        elif copied or live.device.type != "cpu" or not is_as_it_lies(live):
            at_once[key] = live
        else:
            found[key] = live.detach()
    pinned = Slabs.take([live.nbytes for live in apart.values()], pinned=True)
    for number, (key, live) in enumerate(apart.items()):
        found[key] = place = Staged(pinned, number, live.dtype, live.shape)
        _start_copy(place.values(), live)
    pageable = Slabs.take([live.nbytes for live in at_once.values()], pinned=False)
    for number, (key, live) in enumerate(at_once.items()):
        found[key] = place = Staged(pageable, number, live.dtype, live.shape)
        _copy(place, live)
    devices = {live.device: None for live in apart.values()}
    ends = [_end_of_copies(device) for device in devices]
    return Snapshot(StagedValues(found), ends, [pinned, pageable])


def begun_copy(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a few values from their device; return what waits for them, in any thread, and returns them. Those
    of the CPU, and of a device that lets nobody wait, are returned as they are."""
    if not is_copied_apart(values.device):
        return lambda: values
    here = host_memory(values.shape, values.dtype)
    here.copy_(values, non_blocking=True)
    copies = Snapshot({}, [_end_of_copies(values.device)])

    def arrived() -> torch.Tensor:
        copies.wait()
        return here

    return arrived


def _copy(place: Staged, live: torch.Tensor) -> None:
    """Copy values at once, by the C library where no thread of torch's would help: it takes a fifth less time than
    torch for many bytes, and a tenth of the time for few."""
    import torch

    nbytes = live.nbytes
    is_plain = type(live) is torch.Tensor and live.device.type == "cpu" and is_as_it_lies(live)
    if is_plain and (nbytes < ALONE_NBYTES or torch.get_num_threads() == 1):
        ctypes.memmove(place.slabs.address(place.number), live.data_ptr(), nbytes)
    else:
        place.values().copy_(live.detach())


def _start_copy(here: torch.Tensor, live: torch.Tensor) -> None:
    """Start the copy of a device's tensor to contiguous memory of the CPU.

    For one that does not lie in row-major order torch makes another on the device. Where that does not
    fit, it is copied by halves. Raises RunError CKM313 where not even a row fits.
    """
    import torch

    try:
        # A view's sign is taken first: torch would change it while the copy is under way (pytorch#146286).
        here.copy_(live.resolve_conj().resolve_neg(), non_blocking=True)
        return
    except torch.OutOfMemoryError as error:
        if not live.ndim or live.shape[0] < 2:
            raise RunError(
                SHORT,
                f"{live.device} ran out of memory while {list(live.shape)} {live.dtype} was brought into"
                f" row-major order: {first_line(error)}",
                "end what uses the device, or make the model's tensors contiguous; then save again",
            ) from error
    give_back(str(live.device))
    half = live.shape[0] // 2
    for start, count in ((0, half), (half, live.shape[0] - half)):
        _start_copy(here.narrow(0, start, count), live.narrow(0, start, count))


def is_copied_apart(device: torch.device) -> bool:
    """Return whether the host goes on while tensors are copied from the device, and can wait for the copies' end."""
    if device.type == "cpu":
        return False
    import torch

    module = torch.get_device_module(device)
    return hasattr(module, "Event") and hasattr(module, "current_stream")


def _end_of_copies(device: torch.device) -> CopyEvent:
    import torch

    module = torch.get_device_module(device)
    event: Any = module.Event()
    event.record(module.current_stream(device))
    return cast(CopyEvent, event)
