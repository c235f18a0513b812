"""Values are staged to a device and back: on every device, and on one that is slow."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.execution import cuda_ring as ring
from ckptmap.execution import encode
from ckptmap.execution.copy import Context
from ckptmap.planning.file_plan import Encode
from ckptmap.protocols import Encoding, Write
from ckptmap.quantization.nf4.scheme import NF4Scheme
from ckptmap.storage import device_copies
from ckptmap.storage.device_copies import DEPTH
from ckptmap.tensors import Box, TensorInfo
from tests.conftest import Device
from tests.support.late_device import Event, Late, Still, one_late_a_thread, pretend


def writes_of(
    encoding: Encoding, info: TensorInfo, device: str, given: torch.Tensor, finish: bool
) -> list[Write]:
    """All of one weight, through feeds of fewer values than it has; `finish`: statistics, too."""
    encoder = encoding.encoder(info, device)
    step = max(1, 1024 // encoder.step) * encoder.step
    feeds = ring.Feeds(device, 2 * step, given.dtype)

    def fed() -> Any:
        count = offset = 0
        for part in torch.split(given, step + 64):
            room = feeds.room(count, part.numel())
            if type(room) is torch.Tensor:  # a fake one has no values
                room.copy_(part)
            count += part.numel()
            ready = count - count % encoder.step
            yield from encoder.feed(offset, feeds.values(ready))
            feeds.keep(ready, count)
            offset, count = offset + ready, count - ready
        if count:
            yield from encoder.feed(offset, feeds.values(count))

    def kept(writes: Any) -> list[Write]:
        return [Write(w.part, w.box, w.values.clone()) for w in ring.landed(writes, device)]

    return [*kept(fed()), *(kept(encoder.finish()) if finish else ())]


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
        pretend(monkeypatch, Still)
    with device.mode():
        found = writes_of(encoding, info, device.name, given, not device.fake)
    assert {write.values.device.type for write in found} == {"cpu"}
    assert [(w.part, w.box, w.values.shape) for w in found] == [
        (w.part, w.box, w.values.shape) for w in expected
    ]
    if not device.fake:
        assert all(torch.equal(a.values, b.values) for a, b in zip(found, expected, strict=True))


def test_a_buffer_is_filled_anew_after_the_kernels_that_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = Late()
    pretend(monkeypatch, lambda device: way)
    feeds = ring.Feeds("cpu", 8, torch.float32)
    seen = []
    for turn in range(5):
        assert isinstance(feeds.free, Event)
        seen.append(feeds.free)
        feeds.room(2 if turn else 0, 4).fill_(turn)
        sent = feeds.values(4)
        assert sent.tolist() == ([turn - 1] * 2 + [turn] * 2 if turn else [0] * 4)
        feeds.keep(4 if turn else 2, 6 if turn else 4)
        assert (
            feeds.values(2).tolist() == [turn] * 2 and feeds.values(2).data_ptr() != sent.data_ptr()
        )
        assert way.marks == 1 + turn + 1  # what is sent there next waits for this one's kernels
    assert len(set(map(id, seen))) == 4, "two buffers share the first event"
    feeds.room(2, 20).fill_(7)
    assert feeds.values(22).tolist() == [4] * 2 + [7] * 20


def test_a_block_is_filled_anew_when_its_copies_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Late()
    pretend(monkeypatch, lambda device: way)
    way.block_nbytes = 256
    blocks = way.blocks("up")
    for turn in range(9):
        place = blocks.take(96)
        place.fill_(turn)
        blocks.used_until(way.upload(torch.empty_like(place), place))
    assert [gone.waited for _, _, gone in way.uploads] == [True] * 6 + [False] * 3
    assert len({here.data_ptr() for _, here, _ in way.uploads}) == 4, "two places in each block"
    assert blocks.take(256).numel() == 256
    with pytest.raises(AssertionError, match="257 bytes of a block of 256"):
        blocks.take(257)


@pytest.mark.parametrize("budget", [1 << 20, (64 << 20) - 1, 56 << 20, 1 << 30])
def test_blocks_are_powers_of_two_within_the_budget(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator of pinned memory rounds up to powers of two: a byte more would take twice as much."""
    pinned: list[int] = []

    def lasting_memory(nbytes: int) -> torch.Tensor:
        pinned.append(1 << (nbytes - 1).bit_length())
        return torch.empty(nbytes, dtype=torch.uint8)

    way = Late()
    pretend(monkeypatch, lambda device: way)
    monkeypatch.setattr(device_copies, "lasting_memory", lasting_memory)
    assert ring.feed_numel("cpu", budget, 2, 0) * 2 <= ring.FEED_BLOCKS * way.block_nbytes <= budget
    assert device_copies.bound_blocks("cpu", budget) == 2 * way.block_nbytes
    assert (way.blocks("up").nbytes, way.blocks("down").nbytes) == (way.block_nbytes,) * 2
    assert way.blocks("up") is way.blocks("up"), "they are kept from tensor to tensor"
    assert sum(pinned) == 4 * way.block_nbytes <= budget


def test_a_thread_has_one_lanes_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        made = 0

        @classmethod
        def Stream(cls, device: torch.device) -> int:
            cls.made += 1
            return cls.made

        @staticmethod
        def current_device() -> int:
            return 1

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)

    def three() -> list[Any]:
        return [device_copies.lanes(name) for name in ("cuda", "cuda:1", torch.device("cuda:0"))]

    with (
        ThreadPoolExecutor(1) as first,
        ThreadPoolExecutor(1) as second,
    ):  # this thread may have some
        here, again, there = (pool.submit(three).result() for pool in (first, first, second))
    assert here[0] is here[1] is again[0] is not here[2] and again[2] is here[2]
    assert not set(map(id, here)) & set(map(id, there)) and Module.made == 4
    assert device_copies.lanes("cpu") is device_copies.lanes("meta") is None


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
    used = one_late_a_thread(monkeypatch)
    monkeypatch.setattr(device_copies, "BLOCK_NBYTES", 1 << 12)
    ckptmap.convert(source, tmp_path / "found", to=to, world_size=1)
    assert max(len(way.uploads) for way in used) > DEPTH
    if to == "full-fp32":
        sent = sum(here.nbytes for way in used for _, here, _ in way.uploads)
        with ckptmap.open(source) as encoded:
            parts = [lazy.nbytes for lazy in encoded.values() if lazy.encoding != "dense"]
        # A feed may end inside a block of scales, which comes with both.
        assert len(parts) == 2 and sum(parts) <= sent < 1.1 * sum(parts), "decoded on the device"
    with ckptmap.open(tmp_path / "expected") as a, ckptmap.open(tmp_path / "found") as b:
        assert a.keys() == b.keys()
        for fqn, lazy in a.items():
            for part, stored in lazy.parts.items():
                whole = Box.whole(stored.info.shape)
                one, two = lazy.read_part(part, whole), b[fqn].read_part(part, whole)
                assert torch.equal(
                    one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)
                )


class Pinned:
    """Counts the pinned memory of a run's threads as torch's allocator does: blocks of 2^n bytes, until
    nobody holds them. (The main thread, which proves the output, reads it for the CPU.)"""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8)
        if threading.current_thread() is threading.main_thread():
            return made
        rounded = 1 << (nbytes - 1).bit_length()
        self._add(rounded)
        weakref.finalize(made.untyped_storage(), self._add, -rounded)
        return made

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.now += nbytes
            self.peak = max(self.peak, self.now)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("to", ["full-nf4", "full-fp32", "hf-fp8", "full-bnb-nf4-dq"])
def test_pinned_memory_stays_within_max_memory(
    to: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks must be smaller than they are unless bounded, and a result is as large as one or
    larger: it may not come to a block whose result before was not written."""
    maker = torch.Generator().manual_seed(2)
    state = {
        f"{i}.up_proj.weight": torch.randn(384, 1024, generator=maker).bfloat16() for i in range(3)
    }
    torch.save(state, tmp_path / "dense")
    ckptmap.convert(tmp_path / "dense", tmp_path / "in", to="full-nf4")
    source = tmp_path / ("in" if to == "full-fp32" else "dense")
    ckptmap.convert(source, tmp_path / "expected", to=to)
    pinned, memory = Pinned(), threads * (2 << 20)
    one_late_a_thread(monkeypatch)
    monkeypatch.setattr(device_copies, "lasting_memory", pinned)
    ckptmap.convert(source, tmp_path / "found", to=to, threads=threads, max_memory=memory)
    assert 0 < pinned.peak <= memory // 2, "the other half is the buffer of what is written"
    with ckptmap.open(tmp_path / "expected") as a, ckptmap.open(tmp_path / "found") as b:
        for fqn, lazy in a.items():
            for part, stored in lazy.parts.items():
                whole = Box.whole(stored.info.shape)
                one, two = (which.read_part(part, whole).reshape(-1) for which in (lazy, b[fqn]))
                assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), (fqn, part)


@pytest.mark.parametrize(
    ("start", "to", "where"),
    [
        ("full", "full-fp32", {"cpu"}),
        ("full", "hf-fp16", {"cpu"}),
        ("full", "full-int8", {"cuda"}),
        ("full-nf4", "full-int8", {"cuda"}),
        ("full-nf4", "full-fp32", {"cuda", "cpu"}),
    ],
)
def test_dense_values_that_become_dense_ones_use_no_device(
    start: str, to: str, where: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a.q_proj.weight": torch.randn(96, 128).bfloat16(), "norm": torch.ones(8).bfloat16()}
    torch.save(state, tmp_path / "dense.pt")
    ckptmap.convert(tmp_path / "dense.pt", tmp_path / "in", to=start)
    used: set[str] = set()
    chosen = encode._device

    def device(context: Context, step: Encode) -> str:
        used.add(chosen(replace(context, device="cuda"), step))
        return "cpu"

    monkeypatch.setattr(encode, "_device", device)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=to)
    assert used == where


def test_after_an_error_no_copy_is_under_way_to_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the device runs out, and the tensor begins anew in the same blocks."""
    way = Late()
    pretend(monkeypatch, lambda device: way)
    download, arrivals = way.download, []
    monkeypatch.setattr(
        way, "download", lambda *copy: arrivals.append(download(*copy)) or arrivals[-1]
    )

    def writes() -> Any:
        for at in (0, 8):
            yield Write("", Box((at,), (8,)), torch.ones(8))
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        list(ring.landed(writes(), "cpu"))
    assert [arrival.waited for arrival in arrivals] == [True, True]
