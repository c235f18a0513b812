"""Several devices in one process: copies, events and waits are each of one device, whatever is current in a thread.

The stand-in keeps torch's rules: the current device and the current stream of each device belong to a thread, a new
thread begins with device 0, and an event is recorded on streams of one device alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.live.model import reader_threads, tensor_reader
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.storage import device_copies
from ckptmap.tensors import Box
from tests.support.stand_in_device import OnDevice, on_device

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Stream:
    """A stream of one device, and what it was told to wait for."""

    def __init__(self, cuda: Cuda, device: torch.device) -> None:
        self.cuda, self.device = cuda, device

    def wait_event(self, event: Event) -> None:
        assert event.device is not None, "it was recorded"
        self.cuda.waits.append((self, event))

    def wait_stream(self, other: Stream) -> None:
        assert other.device == self.device
        self.cuda.joined.append((self, other))


class Event:
    def __init__(self) -> None:
        self.device: torch.device | None = None

    def record(self, stream: Stream) -> None:
        assert self.device in (None, stream.device), "an event is of one device"
        self.device = stream.device

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        assert self.device is not None


class Cuda:
    """What torch.cuda keeps for each thread."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._default = [Stream(self, device) for device in DEVICES]
        self.waits: list[tuple[Stream, Event]] = []
        self.joined: list[tuple[Stream, Stream]] = []
        self.copies: list[tuple[torch.device, torch.device, str]] = []
        self.Event = Event

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, device)

    def current_device(self) -> int:
        return int(getattr(self._thread, "device", 0))

    def current_stream(self, device: torch.device) -> Stream:
        streams: dict[int, Stream] = self._thread.__dict__.setdefault("streams", {})
        assert device.index is not None
        return streams.get(device.index, self._default[device.index])

    def set_stream(self, stream: Stream) -> None:
        """It makes the stream's device current, too."""
        assert stream.device.index is not None
        self._thread.device = stream.device.index
        self._thread.__dict__.setdefault("streams", {})[stream.device.index] = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        source = self.current_stream(DEVICES[self.current_device()])
        target = self.current_stream(stream.device)
        self.set_stream(stream)
        yield
        self.set_stream(target)
        self.set_stream(source)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made, copy = Cuda(), torch.Tensor.copy_

    def copy_(there: Any, here: torch.Tensor, non_blocking: bool = False) -> Any:
        where = there.base_device if hasattr(there, "base_device") else None
        if non_blocking and where is not None:
            stream = made.current_stream(where)
            made.copies.append((where, stream.device, threading.current_thread().name))
            assert stream not in made._default, "copies are on a side stream"
        with torch._C.DisableTorchFunctionSubclass():
            return copy(there, here)

    split = torch.split

    def torch_split(tensor: Any, nbytes: int) -> Any:
        parts = split(tensor.as_subclass(torch.Tensor), nbytes)
        return [on_it(part, tensor.where) for part in parts]

    monkeypatch.setattr(torch, "split", torch_split)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: made)
    monkeypatch.setattr(
        device_copies, "lasting_memory", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
    )
    monkeypatch.setattr(device_copies, "_threads", threading.local())
    monkeypatch.setattr(tensor_reader, "count_for", lambda devices, memory: 3)
    monkeypatch.setattr(reader_threads, "LEAST_WORK", 1)
    return made


def on_it(values: torch.Tensor, where: torch.device) -> OnDevice:
    made = on_device(values, where)
    made.base_device = where  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("by", ["threads", "this thread"])
def test_tensors_of_two_devices_are_filled(by: str, cuda: Cuda, tmp_path: Path) -> None:
    maker = torch.Generator().manual_seed(1)
    state = {f"w{n}": torch.randn(64, 64, generator=maker) for n in range(8)}
    torch.save(state, tmp_path / "w.pt")
    outs = {name: on_device(torch.zeros(64, 64), DEVICES[n % 2]) for n, name in enumerate(state)}
    mine = [cuda.Stream(device) for device in DEVICES]
    for stream in reversed(mine):  # the caller's own, and device 0 is current
        cuda.set_stream(stream)
    with ckptmap.open(tmp_path / "w.pt") as checkpoint:
        reader = TensorReader(checkpoint.files, 3 * 2 * 2 * 4096, DEVICES)
        if by == "this thread":
            reader.threads = 1
        steps = [
            lambda its, name=name: its.dense(checkpoint[name], Box.whole((64, 64)), outs[name])
            for name in state
        ]
        with closing(reader):
            assert len(list(reader.run_all(steps, [out.nbytes for out in outs.values()]))) == 8
    for name, out in outs.items():
        assert torch.equal(out.as_subclass(torch.Tensor), state[name]), name
    assert {where for where, _, _ in cuda.copies} == set(DEVICES)
    assert all(where == side for where, side, _ in cuda.copies)
    assert {waiting for waiting, _ in cuda.joined} == set(mine), "kernels of the caller wait"
    assert all(event.device == stream.device for stream, event in cuda.waits)
    names = {name.rpartition("_")[0] for *_, name in cuda.copies}
    assert names == ({"ckptmap-load"} if by == "threads" else {""})
    assert cuda.current_device() == 0, "as it was"
    assert [cuda.current_stream(device) for device in DEVICES] == mine


def test_a_thread_has_streams_for_each_device_and_keeps_its_current_one(cuda: Cuda) -> None:
    ways = [device_copies.lanes(device) for device in (*DEVICES, torch.device("cuda"))]
    assert ways[0] is ways[2] is not ways[1]
    cuda.set_stream(cuda.Stream(DEVICES[1]))
    assert device_copies.lanes("cuda") is ways[1]
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(device_copies.lanes("cuda:1")))
    other.start()
    other.join()
    assert found[0] not in ways and found[0].device == DEVICES[1]
