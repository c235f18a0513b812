"""Copy values to a device and results back, while other values are read and encoded.

    file -> pinned buffer of the ring -> device (side stream) -> encoded (current stream)
                                      -> pinned result (current stream) -> written to the file

While one box is encoded, the next one is read and copied. The host never waits for the whole
device: it waits for the copy out of one buffer, DEPTH boxes later, before it fills that buffer
again, and for one result, DEPTH boxes later, before it writes that result. On the CPU there is one
buffer, and the encoder reads it directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ckptmap.protocols import Write

if TYPE_CHECKING:
    import torch

DEPTH = 2
"""Buffers of the ring, and results that may be on their way back at a time."""
MAX_ELEMENTS = 1 << 22
"""The most elements sent at once: a GPU needs larger boxes than a CPU cache holds."""
ELEMENT_NBYTES = 16
"""Bytes of host memory for each element sent: up to 4 in each buffer of the ring, and as many for
results."""


class Lanes:
    """Two streams of a device: the current one runs kernels, a side stream uploads values."""

    def __init__(self, device: str) -> None:
        import torch

        self.device = torch.device(device)
        self._streams: Any = torch.get_device_module(self.device)
        self._side = self._streams.Stream(device=self.device)

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned host memory: only copies from and to such memory are asynchronous."""
        import torch

        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def upload(self, there: torch.Tensor, here: torch.Tensor, free: object) -> object:
        """Copy `here` to the device after the event `free`; return the event of the copy's end.

        Kernels that are launched from now on wait for that event.
        """
        with self._streams.stream(self._side):
            self._side.wait_event(free)
            there.copy_(here, non_blocking=True)
            gone = self._streams.Event()
            gone.record(self._side)
        self._streams.current_stream(self.device).wait_event(gone)
        return gone

    def download(self, here: torch.Tensor, there: torch.Tensor) -> object:
        """Copy `there` to the host after the kernels launched so far; return the event of its end.

        The copy is on the stream of the kernels, so later kernels may reuse the device memory.
        """
        here.copy_(there, non_blocking=True)
        return self.mark()

    def mark(self) -> object:
        """Return the event of the end of all work launched so far on the current stream."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event


def lanes(device: str) -> Lanes | None:
    """Return the streams of a device; None for the CPU and for devices that have no streams."""
    import torch

    kind = torch.device(device)
    if kind.type == "cpu" or not hasattr(torch.get_device_module(kind), "Stream"):
        return None
    return Lanes(device)


class Ring(Protocol):
    """A buffer of values in row-major order.

    Fill `place`, then call `send`, then `keep`, which moves the values that were not sent to the
    start of the next buffer.
    """

    place: torch.Tensor
    """Host memory to fill."""

    def send(self, count: int) -> torch.Tensor:
        """Return the first `count` values on the device; they are valid until `keep`."""

    def keep(self, sent: int, count: int) -> None:
        """Set `place` to the next buffer, with the values from `sent` to `count` at its start."""

    def grow(self, count: int, numel: int) -> None:
        """Set `place` to a buffer with room for `numel` values after the first `count`."""


class _Straight:
    """One buffer, for the CPU or for a device without streams, where a copy blocks the host."""

    def __init__(self, device: str, numel: int, dtype: torch.dtype) -> None:
        import torch

        self._device = device
        self.place = torch.empty(numel, dtype=dtype)

    def send(self, count: int) -> torch.Tensor:
        return self.place[:count].to(self._device)

    def keep(self, sent: int, count: int) -> None:
        self.place[: count - sent] = self.place[sent:count].clone()

    def grow(self, count: int, numel: int) -> None:
        self.place = _longer(self.place, count, self.place.new_empty(count + numel))


class _Pinned:
    """DEPTH buffers of pinned memory and as many on the device."""

    def __init__(self, way: Lanes, numel: int, dtype: torch.dtype) -> None:
        import torch

        self._way = way
        self._here = [way.host(numel, dtype) for _ in range(DEPTH)]
        self._there = [torch.empty_like(here, device=way.device) for here in self._here]
        self._gone: list[Any] = [None] * DEPTH
        self._free = [way.mark()] * DEPTH  # earlier kernels may still use the allocator's memory
        self._turn = 0
        self.place = self._here[0]

    def send(self, count: int) -> torch.Tensor:
        at = self._turn
        there = self._there[at].narrow(0, 0, count)
        self._gone[at] = self._way.upload(there, self.place[:count], self._free[at])
        return there

    def keep(self, sent: int, count: int) -> None:
        """Take the next buffer; the kernels that read the sent values are launched by now."""
        self._free[self._turn] = self._way.mark()
        left = self.place[sent:count]
        self._turn = at = (self._turn + 1) % DEPTH
        if self._gone[at] is not None:
            self._gone[at].synchronize()
        self.place = self._here[at]
        self.place[: left.numel()] = left

    def grow(self, count: int, numel: int) -> None:
        import torch

        at = self._turn
        wide = self._way.host(count + numel, self.place.dtype)
        self.place = self._here[at] = _longer(self.place, count, wide)
        self._there[at] = torch.empty_like(wide, device=self._way.device)
        self._free[at] = self._way.mark()


def _longer(place: torch.Tensor, count: int, wide: torch.Tensor) -> torch.Tensor:
    wide[:count] = place[:count]
    return wide


def ring(device: str, numel: int, dtype: torch.dtype) -> Ring:
    """Return a ring whose buffers have room for `numel` values each."""
    way = lanes(device)
    return _Straight(device, numel, dtype) if way is None else _Pinned(way, numel, dtype)


def elements(device: str, budget: int, on_cpu: int) -> int:
    """Return how many elements to send at once; `on_cpu` if the device has no streams."""
    return on_cpu if lanes(device) is None else min(MAX_ELEMENTS, budget // ELEMENT_NBYTES)


def landed(writes: Iterable[Write], device: str) -> Iterator[Write]:
    """Yield the writes in order with their values on the CPU.

    Up to DEPTH results are copied back while the encoder computes later ones.
    """
    way = lanes(device)
    if way is None:
        yield from writes
        return
    coming: deque[tuple[Write, object]] = deque()
    for write in writes:
        if write.values.device.type != way.device.type:
            yield from _all(coming)
            yield write
            continue
        there = write.values.detach().contiguous()
        here = way.host(there.numel(), there.dtype).view(there.shape)
        coming.append((Write(write.part, write.box, here), way.download(here, there)))
        if len(coming) > DEPTH:
            yield from _all(coming, leave=DEPTH)
    yield from _all(coming)


def _all(coming: deque[tuple[Write, Any]], leave: int = 0) -> Iterator[Write]:
    while len(coming) > leave:
        write, come = coming.popleft()
        come.synchronize()
        yield write
