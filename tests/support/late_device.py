"""Devices that only pretend, for tests of copies: one that is slow, and one that checks what is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from ckptmap.storage import device_copies
from ckptmap.storage.device_copies import BLOCK_NBYTES, Lanes


class Event:
    """`done` is what happens at last when it is waited for."""

    def __init__(self, done: Any = None) -> None:
        self.waited, self._done = False, done

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        if self._done is not None and not self.waited:
            self._done()
        self.waited = True


class Late(Lanes):
    """A device that only pretends: what is copied from it comes when it is waited for, not before.
    Memory that it reads is checked to be left alone until then."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._blocks = {}
        self.block_nbytes = BLOCK_NBYTES
        self.uploads: list[tuple[torch.Tensor, torch.Tensor, Event]] = []
        self.marks = 0

    @contextmanager
    def uploading(self, free: Any) -> Iterator[None]:
        assert isinstance(free, Event)
        yield

    def upload(self, there: torch.Tensor, here: torch.Tensor, again: Any = None) -> Any:
        low, high = here.data_ptr(), here.data_ptr() + here.nbytes
        for _, _, gone in [up for up in self.uploads if low <= up[1].data_ptr() < high]:
            assert gone.waited, "a place was filled anew before its copy had gone"
        there.copy_(here)
        self.uploads.append((there, here, Event(partial(self._gone, len(self.uploads)))))
        return self.uploads[-1][2]

    def _gone(self, count: int) -> None:
        """Copies on one stream end in order."""
        for _, _, gone in self.uploads[:count]:
            gone.waited = True

    def download(self, here: torch.Tensor, there: torch.Tensor) -> Any:
        held = there.clone()  # kernels after it may use the memory again
        return Event(lambda: here.copy_(held))

    def mark(self) -> Any:
        self.marks += 1
        return Event()


class Still(Lanes):
    """A GPU that only pretends: copies are checked to be of one size and kind, between the devices;
    a build of torch without CUDA cannot make them."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._blocks = {}
        self.block_nbytes = BLOCK_NBYTES

    @contextmanager
    def uploading(self, free: Any) -> Iterator[None]:
        assert isinstance(free, Event)
        yield

    def upload(self, there: torch.Tensor, here: torch.Tensor, again: Any = None) -> Any:
        assert (there.device.type, here.device.type) == (self.device.type, "cpu")
        assert (there.shape, there.dtype) == (here.shape, here.dtype)
        return Event()

    def download(self, here: torch.Tensor, there: torch.Tensor) -> Any:
        return self.upload(there, here)

    def mark(self) -> Any:
        return Event()


def pretend(monkeypatch: pytest.MonkeyPatch, lanes: Callable[[Any], Lanes]) -> None:
    """Make every device one that pretends; a build of torch without CUDA pins no memory."""

    def lasting_memory(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    monkeypatch.setattr(device_copies, "lanes", lanes)
    monkeypatch.setattr(device_copies, "lasting_memory", lasting_memory)


def one_late_a_thread(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Make the CPU a slow device; return those that threads come to use."""
    threads = threading.local()
    used: list[Late] = []

    def late(device: object) -> Late:
        if not hasattr(threads, "way"):
            used.append(Late())
            threads.way = used[-1]
        return threads.way  # type: ignore[no-any-return]

    pretend(monkeypatch, late)
    return used
