"""Boxes on their way to a device and back: pinned memory in a ring, copies on a stream of their own.

    file -> place of the ring -> copied on the side stream -> encoded on the current stream
                                        -> copied back behind it -> written when it has come

While a box is encoded the next one is read and copied. Nobody waits for the device as a whole: a
place is filled anew when its own copy has gone, DEPTH boxes later, and a result is written when it
has come, DEPTH boxes later. On the CPU there is one place, and what is sent is the place itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ckptmap.protocols import Write

if TYPE_CHECKING:
    import torch

DEPTH = 2
"""Places of the ring, and boxes whose results may be on their way."""
MAX_ELEMENTS = 1 << 22
"""Elements sent at once: a GPU needs more than a cache holds."""
ELEMENT_NBYTES = 16
"""Bytes of host memory that an element costs: of up to 4, in all places, and as results."""


class Lanes:
    """A device's current stream, on which kernels run, and one more, on which values come to it."""

    def __init__(self, device: str) -> None:
        import torch

        self.device = torch.device(device)
        self._streams: Any = torch.get_device_module(self.device)
        self._side = self._streams.Stream(device=self.device)

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned, so that copies need not be waited for."""
        import torch

        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def upload(self, there: torch.Tensor, here: torch.Tensor, free: Any) -> Any:
        """Copy after `free`, before all that is asked for from now on; when it has gone."""
        with self._streams.stream(self._side):
            self._side.wait_event(free)
            there.copy_(here, non_blocking=True)
            gone = self._streams.Event()
            gone.record(self._side)
        self._streams.current_stream(self.device).wait_event(gone)
        return gone

    def download(self, here: torch.Tensor, there: torch.Tensor) -> Any:
        """Copy behind the kernels asked for so far, which may use the memory again behind it."""
        here.copy_(there, non_blocking=True)
        return self.mark()

    def mark(self) -> Any:
        """When all that was asked for so far is done."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event


def lanes(device: str) -> Lanes | None:
    """None: values go nowhere, or to a device that has no streams."""
    import torch

    kind = torch.device(device)
    if kind.type == "cpu" or not hasattr(torch.get_device_module(kind), "Stream"):
        return None
    return Lanes(device)


class Ring(Protocol):
    """Values in row-major order: filled into `place`, sent, what is left over kept for the next."""

    place: torch.Tensor
    """Host memory to fill."""

    def send(self, count: int) -> torch.Tensor:
        """The first `count` values, on the device; valid until `keep`."""

    def keep(self, sent: int, count: int) -> None:
        """A place to fill, with the values between `sent` and `count` at its start."""

    def grow(self, count: int, numel: int) -> None:
        """`place` with room for `numel` values after the first `count`."""


class _Straight:
    """One place: the CPU's, or a device's to which values are copied and waited for."""

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
    """DEPTH places of pinned memory and as many on the device."""

    def __init__(self, way: Lanes, numel: int, dtype: torch.dtype) -> None:
        import torch

        self._way = way
        self._here = [way.host(numel, dtype) for _ in range(DEPTH)]
        self._there = [torch.empty_like(here, device=way.device) for here in self._here]
        self._gone: list[Any] = [None] * DEPTH
        self._free = [way.mark()] * DEPTH  # the memory may be that of earlier kernels
        self._turn = 0
        self.place = self._here[0]

    def send(self, count: int) -> torch.Tensor:
        at = self._turn
        there = self._there[at].narrow(0, 0, count)
        self._gone[at] = self._way.upload(there, self.place[:count], self._free[at])
        return there

    def keep(self, sent: int, count: int) -> None:
        """The kernels that use what was sent have been asked for by now."""
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
    """With room for `numel` values."""
    way = lanes(device)
    return _Straight(device, numel, dtype) if way is None else _Pinned(way, numel, dtype)


def elements(device: str, budget: int, on_cpu: int) -> int:
    """How many to send at once; `on_cpu`, where they go nowhere."""
    return on_cpu if lanes(device) is None else min(MAX_ELEMENTS, budget // ELEMENT_NBYTES)


def landed(writes: Iterable[Write], device: str) -> Iterator[Write]:
    """The same in order, values on the CPU, each when it has come while later ones are made."""
    way = lanes(device)
    if way is None:
        yield from writes
        return
    coming: deque[tuple[Write, Any]] = deque()
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
