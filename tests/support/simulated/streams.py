"""Streams and events with vector clocks, and the module of the device."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "sim"
LOCK = threading.RLock()
"""Held while clocks or accesses change."""


class Clock(dict[str, int]):
    """The number of things of each stream that are known to be over."""

    def join(self, other: Clock) -> None:
        """Know what another clock knows, too."""
        for stream, count in other.items():
            self[stream] = max(count, self.get(stream, 0))

    def knows(self, stream: str, count: int) -> bool:
        return self.get(stream, 0) >= count

    def includes(self, other: Clock) -> bool:
        return all(self.knows(stream, count) for stream, count in other.items())


class Host:
    """What the host has waited for. Its threads count as one: how they wait for each other is not seen."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.waited: list[Callable[[], None]] = []
        """Called after each wait."""
        self.waits: list[str] = []
        """Why each wait was made, by which thread, and where."""
        self.place: Callable[[], str] = str

    def wait(self, clock: Clock, why: str) -> None:
        with LOCK:
            self.waits.append(f"{threading.current_thread().name}: {why}, at {self.place()}")
            self.clock.join(clock)
            for call in self.waited:
                call()


HOST = Host()


class Stream:
    """A stream of the device, with the methods of `torch.cuda.Stream` that are used."""

    _made = 0

    def __init__(self, device: object = None) -> None:
        Stream._made += 1
        self.name = f"stream {Stream._made}"
        self.clock = Clock()
        MODULE.streams.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def advance(self) -> int:
        """Return the number of the next thing on this stream."""
        self.clock.join(HOST.clock)
        count = self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return count

    def wait_event(self, event: Event) -> None:
        with LOCK:
            self.clock.join(event.clock)

    def wait_stream(self, other: Stream) -> None:
        with LOCK:
            self.clock.join(other.clock)

    def synchronize(self) -> None:
        HOST.wait(self.clock, "Stream.synchronize")


class Event:
    """An event: what its stream had done when it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        with LOCK:
            on = stream or MODULE.current_stream()
            on.advance()
            self.clock = Clock(on.clock)

    def query(self) -> bool:
        """Return whether the host knows of its end: never before it has waited."""
        with LOCK:
            return HOST.clock.includes(self.clock)

    def synchronize(self) -> None:
        HOST.wait(self.clock, "Event.synchronize")


class Module(types.ModuleType):
    """What `torch.get_device_module` returns. The current stream belongs to a thread, as in torch."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        super().__init__(NAME)
        self.streams: list[Stream] = []
        self._threads = threading.local()

    def begin(self) -> None:
        """Make the default stream."""
        self._default = Stream()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the CPU's."""

    def get_rng_state(self, device: object = 0) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = 0) -> None:
        assert not state.any()

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._threads, "stream", self._default)

    def set_stream(self, stream: Stream) -> None:
        self._threads.stream = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def synchronize(self, device: Any = None) -> None:
        for stream in list(self.streams):
            HOST.wait(stream.clock, "synchronize")


MODULE = Module()
