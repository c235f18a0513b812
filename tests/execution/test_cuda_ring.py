"""Values are staged to a device and back: on every device, and on one that is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.execution import cuda_ring as ring
from ckptmap.protocols import Encoding, Write
from ckptmap.quantization.nf4.scheme import NF4Scheme
from ckptmap.tensors import Box, TensorInfo
from tests.conftest import Device


class Event:
    """`done` is what happens at last when it is waited for."""

    def __init__(self, done: Any = None) -> None:
        self.waited, self._done = False, done

    def synchronize(self) -> None:
        if self._done is not None and not self.waited:
            self._done()
        self.waited = True


class Late(ring.Lanes):
    """A device that only pretends: what is copied from it comes when it is waited for, not before.
    Memory that it reads is checked to be left alone until then."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.uploads: list[tuple[torch.Tensor, torch.Tensor, Event]] = []
        self.marks = 0

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def upload(self, there: torch.Tensor, here: torch.Tensor, free: Any) -> Any:
        for _, _, gone in [up for up in self.uploads if up[1].data_ptr() == here.data_ptr()]:
            assert gone.waited, "a place was filled anew before its copy had gone"
        there.copy_(here)
        self.uploads.append((there, here, Event()))
        return self.uploads[-1][2]

    def download(self, here: torch.Tensor, there: torch.Tensor) -> Any:
        held = there.clone()  # kernels after it may use the memory again
        return Event(lambda: here.copy_(held))

    def mark(self) -> Any:
        self.marks += 1
        return Event()


class Still(ring.Lanes):
    """A GPU that only pretends: copies are checked to be of one size and kind, between the devices;
    a build of torch without CUDA cannot make them."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def upload(self, there: torch.Tensor, here: torch.Tensor, free: Any) -> Any:
        assert (there.device.type, here.device.type) == (self.device.type, "cpu")
        assert (there.shape, there.dtype) == (here.shape, here.dtype)
        return Event()

    def download(self, here: torch.Tensor, there: torch.Tensor) -> Any:
        return self.upload(there, here, None)

    def mark(self) -> Any:
        return Event()


def writes_of(
    encoding: Encoding, info: TensorInfo, device: str, given: torch.Tensor, finish: bool
) -> list[Write]:
    """All of one weight, through a ring of fewer values than it has; `finish`: statistics, too."""
    encoder = encoding.encoder(info, device)
    step = max(1, 1024 // encoder.step) * encoder.step
    held = ring.ring(device, 2 * step, given.dtype)

    def fed() -> Any:
        count = offset = 0
        for part in torch.split(given, step + 64):
            held.place[count : count + part.numel()] = part
            count += part.numel()
            ready = count - count % encoder.step
            yield from encoder.feed(offset, held.send(ready))
            held.keep(ready, count)
            offset, count = offset + ready, count - ready
        if count:
            yield from encoder.feed(offset, held.send(count))

    found = [*ring.landed(fed(), device)]
    return [*found, *ring.landed(encoder.finish(), device)] if finish else found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_come_to_the_device_and_results_back(
    device: Device, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = TensorInfo((64, 128), dtype)
    encoding = NF4Scheme().target("a.weight", info)
    assert encoding is not None
    given = torch.randn(info.numel, generator=torch.Generator().manual_seed(1)).to(
        getattr(torch, dtype)
    )
    expected = writes_of(encoding, info, "cpu", given, not device.fake)
    if device.fake:
        monkeypatch.setattr(ring, "lanes", Still)
    with device.mode():
        found = writes_of(encoding, info, device.name, given, not device.fake)
    assert {write.values.device.type for write in found} == {"cpu"}
    assert [(w.part, w.box, w.values.shape) for w in found] == [
        (w.part, w.box, w.values.shape) for w in expected
    ]
    if not device.fake:
        assert all(torch.equal(a.values, b.values) for a, b in zip(found, expected, strict=True))


def test_a_place_is_filled_anew_when_its_copy_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Late()
    monkeypatch.setattr(ring, "lanes", lambda device: way)
    held = ring.ring("cpu", 8, torch.float32)
    for turn in range(5):
        held.place[:4] = turn
        sent = held.send(4)
        assert sent.tolist() == [turn] * 4 and sent.data_ptr() != held.place.data_ptr()
        held.keep(2, 4)
        assert held.place[:2].tolist() == [turn] * 2
        assert way.marks == 1 + turn + 1  # what is sent there next waits for this one's kernels
    assert [gone.waited for _, _, gone in way.uploads] == [True] * 4 + [False]
    assert len({here.data_ptr() for _, here, _ in way.uploads}) == ring.DEPTH
    held.grow(2, 20)
    held.place[2:22] = 7
    assert held.send(22).tolist() == [4] * 2 + [7] * 20


@pytest.mark.parametrize("to", ["full-nf4", "fsdp2-int8", "full-fp32", "full-bnb-nf4"])
def test_a_conversion_by_a_device_that_takes_its_time_is_the_same(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = torch.Generator().manual_seed(2)
    shapes = {"a.q_proj.weight": (96, 128), "b.up_proj.weight": (257, 64), "norm.weight": (67,)}
    state = {key: torch.randn(shape, generator=maker).bfloat16() for key, shape in shapes.items()}
    torch.save(state, tmp_path / "dense")
    ckptmap.convert(tmp_path / "dense", tmp_path / "in", to="full-nf4")
    source = tmp_path / ("in" if to == "full-fp32" else "dense")
    ckptmap.convert(source, tmp_path / "expected", to=to, world_size=1)
    used: list[Late] = []

    def late(device: str) -> Late:
        used.append(Late())
        return used[-1]

    monkeypatch.setattr(ring, "lanes", late)
    monkeypatch.setattr(ring, "MAX_ELEMENTS", 1 << 11)
    ckptmap.convert(source, tmp_path / "found", to=to, world_size=1)
    assert max(len(way.uploads) for way in used) > ring.DEPTH
    with ckptmap.open(tmp_path / "expected") as a, ckptmap.open(tmp_path / "found") as b:
        assert a.keys() == b.keys()
        for fqn, lazy in a.items():
            for part, stored in lazy.parts.items():
                whole = Box.whole(stored.info.shape)
                one, two = lazy.read_part(part, whole), b[fqn].read_part(part, whole)
                assert torch.equal(
                    one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)
                )
