"""The pinned blocks of a load's threads: made while it is planned, shared by its devices, given back after it. The
CPU pretends to be a device; what is copied to it arrives late."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptmap
from ckptmap.errors import LoadError, SourceError
from ckptmap.live.load import load as load_module
from ckptmap.live.model import reader_memory, reader_threads, tensor_reader
from ckptmap.live.model.reader_memory import ReaderMemory
from ckptmap.storage import device_copies, registered_memory
from ckptmap.storage.device_copies import DEPTH
from ckptmap.storage.files import Files
from tests.support.late_device import Late, one_late_a_thread

CPU = torch.device("cpu")
BLOCK = 1 << 12
THREADS = 4
PATIENCE_S = 20


class Streams:
    current_stream = set_stream = staticmethod(lambda stream: stream)


class Made:
    """The memories that are made, and those that are given back: the thread of each."""

    def __init__(self) -> None:
        self.by: list[tuple[str, int]] = []
        self.idle: list[str] = []
        self.may_begin = threading.Event()
        self.may_begin.set()
        self.begun = threading.Event()

    def new(self, nbytes: int) -> torch.Tensor:
        self.begun.set()
        assert self.may_begin.wait(PATIENCE_S)
        self.by.append((threading.current_thread().name, nbytes))
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def let_go(self, memory: torch.Tensor) -> None:
        self.idle.append(threading.current_thread().name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    found = Made()
    monkeypatch.setattr(load_module, "devices_of", lambda targets: [CPU])
    monkeypatch.setattr(torch, "get_device_module", lambda device: Streams)
    for module in (reader_memory, reader_threads, tensor_reader):
        monkeypatch.setattr(module, "copies_pinned", lambda device: True)
    monkeypatch.setattr(tensor_reader, "count_for", lambda devices, memory: THREADS)
    monkeypatch.setattr(reader_threads, "LEAST_WORK", 1 << 14)
    monkeypatch.setattr(device_copies, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(reader_memory, "let_go", found.let_go)
    yield found
    while reader_memory._giving_back:
        reader_memory._giving_back.pop().join()


@pytest.fixture
def ways(made: Made, monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    used = one_late_a_thread(monkeypatch)
    monkeypatch.setattr(device_copies, "lasting_memory", made.new)
    return used


def build(seed: int) -> nn.Module:
    """One tensor has nine tenths of all bytes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 8))


def saved(folder: Path, kind: str) -> Path:
    state = build(1).state_dict()
    if kind == "torch.save":
        torch.save(state, folder / "weights.pt")
        return folder / "weights.pt"
    if kind == "ckptmap.save":
        ckptmap.save(folder / "saved", build(1), background=False)
        return folder / "saved"
    save_file(state, folder / "model.safetensors")
    if kind == "safetensors":
        return folder / "model.safetensors"
    ckptmap.convert(folder / "model.safetensors", folder / "converted", to="hf")
    return folder / "converted"


def equal(model: nn.Module) -> bool:
    wanted = build(1).state_dict()
    return all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("verify", ["none", "stored"])
@pytest.mark.parametrize("kind", ["torch.save", "ckptmap.save", "safetensors"])
def test_all_threads_fill_the_largest_tensor(
    kind: str, verify: Any, ways: list[Late], made: Made, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Each byte is read once, by few calls, and goes through the blocks that were made for its thread."""
    path, model = saved(tmp_path, kind), build(2)
    read, together = Files.read_into, threading.Barrier(THREADS, timeout=PATIENCE_S)
    reads: Counter[str] = Counter()
    joined: set[str] = set()

    def read_into(self: Files, file: str, offset: int, buffers: Any, *more: Any) -> None:
        name = threading.current_thread().name
        if name.startswith("ckptmap-load") and len(buffers) == 1:
            if name not in joined and buffers[0].nbytes == BLOCK:  # of the largest tensor
                joined.add(name)
                together.wait()
            reads[name] += buffers[0].nbytes
        read(self, file, offset, buffers, *more)

    monkeypatch.setattr(Files, "read_into", read_into)
    report = ckptmap.load(path, model, verify=verify)
    nbytes = sum(p.nbytes for p in model.parameters())
    assert equal(model) and len(report.loaded) == 6
    assert len(reads) == THREADS and sum(reads.values()) == nbytes
    assert report.source.checked >= (nbytes if verify == "stored" and kind != "safetensors" else 0)
    assert report.source.unchecked == 0
    by_threads = [one for one in made.by if one[0] != "MainThread"]  # it reads random streams
    assert by_threads == [("ckptmap-load-memory", THREADS * DEPTH * BLOCK)]
    sent = [up for way in ways if way.crew is not None for up in way.uploads]
    assert len(sent) <= nbytes // BLOCK + 6, "a copy a block, and one for each little tensor"
    assert all(gone.waited for _, _, gone in sent if gone is not None), "they have ended"


def test_a_digest_that_needs_the_order_is_computed_by_one_thread(
    ways: list[Late], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What ckptmap wrote as safetensors has an xxh3 of each tensor: parts in another order would be read again."""
    path, model = saved(tmp_path, "converted"), build(2)
    places: dict[str, set[str]] = {}
    read, nbytes = Files.read_into, [0]

    def read_into(self: Files, file: str, offset: int, buffers: Any, *more: Any) -> None:
        if threading.current_thread().name.startswith("ckptmap-load"):
            places.setdefault(threading.current_thread().name, set()).add(f"{file} {offset}")
            nbytes[0] += sum(one.nbytes for one in buffers)
        read(self, file, offset, buffers, *more)

    monkeypatch.setattr(Files, "read_into", read_into)
    monkeypatch.setattr(tensor_reader, "that_pay", lambda count, sizes, shared: count)
    report = ckptmap.load(path, model, verify="stored")
    total = sum(p.nbytes for p in model.parameters())
    assert equal(model) and report.source.checked == total and report.source.unchecked == 0
    assert nbytes == [total]
    largest = max(map(len, places.values()))
    assert largest >= 256 * 256 * 4 // BLOCK, "one thread has read all blocks of the largest"


def test_a_byte_that_is_not_as_stated_is_found_by_a_helper(
    ways: list[Late], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = saved(tmp_path, "torch.save")
    content = bytearray(path.read_bytes())
    at = content.index(build(1).state_dict()["0.weight"].numpy().tobytes())
    content[at + 100_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"0\.weight.*expected CRC-32"):
        ckptmap.load(path, build(2), verify="stored")


def test_memory_is_made_while_the_load_is_planned(
    ways: list[Late], made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan comes to its end although the memory does not; then the load waits for it."""
    path, model = saved(tmp_path, "torch.save"), build(2)
    made.may_begin.clear()
    plan, planned = load_module.TensorMatcher.plan, list[bool]()

    def matched(self: Any) -> Any:
        assert made.begun.wait(PATIENCE_S), "it begins before names are matched"
        found = plan(self)
        planned.append(not made.by)
        threading.Timer(0.1, made.may_begin.set).start()
        return found

    monkeypatch.setattr(load_module.TensorMatcher, "plan", matched)
    ckptmap.load(path, model, verify="none")
    assert planned == [True] and equal(model) and len(made.by) == 1


def test_memory_is_given_back_in_a_thread_and_before_the_next_is_made(
    ways: list[Late], made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, go_on = saved(tmp_path, "torch.save"), threading.Event()

    def let_go(memory: torch.Tensor) -> None:
        assert go_on.wait(PATIENCE_S)
        made.let_go(memory)

    monkeypatch.setattr(reader_memory, "let_go", let_go)
    ckptmap.load(path, build(2), verify="none")
    assert not made.idle, "load has returned, and the memory is still there"
    second = threading.Thread(target=lambda: ckptmap.load(path, build(3), verify="none"))
    second.start()
    second.join(0.3)
    assert second.is_alive() and len(made.by) == 1
    go_on.set()
    second.join(PATIENCE_S)
    assert not second.is_alive() and len(made.by) == 2
    assert made.idle[0] == "ckptmap-load-memory"


def test_a_load_that_is_refused_gives_its_memory_back(
    ways: list[Late], made: Made, tmp_path: Path
) -> None:
    path = saved(tmp_path, "torch.save")
    with pytest.raises(LoadError):
        ckptmap.load(path, nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8)))
    while reader_memory._giving_back:
        reader_memory._giving_back.pop().join()
    assert len(made.by) == len(made.idle) == 1 and len(ways) == 0


def test_nothing_keeps_the_memory_when_the_load_has_ended(
    ways: list[Late], made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither threads nor views nor a cycle: it is freed by its thread, not when garbage is collected."""
    path, ended = saved(tmp_path, "torch.save"), list[str]()

    class Owner(bytearray):
        def __del__(self) -> None:
            ended.append(threading.current_thread().name)

    monkeypatch.setattr(
        device_copies, "lasting_memory",
        lambda nbytes: torch.frombuffer(Owner(nbytes), dtype=torch.uint8),
    )  # fmt: skip
    gc.disable()
    try:
        ckptmap.load(path, build(2), verify="none")
        for way in ways:  # the stand-in's events refer to what went through it
            way.uploads.clear()
            way._blocks.clear()
        del way
        ways.clear()
        while reader_memory._giving_back:
            reader_memory._giving_back.pop().join()
        assert len(ended) == 1
    finally:
        gc.enable()


def test_what_making_the_memory_raises_ends_the_load(
    ways: list[Late], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, model = saved(tmp_path, "torch.save"), build(2)

    def refused(nbytes: int) -> torch.Tensor:
        raise MemoryError(f"{nbytes} bytes")

    monkeypatch.setattr(device_copies, "lasting_memory", refused)
    with pytest.raises(MemoryError):
        ckptmap.load(path, model, verify="none")
    wanted = build(2).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_several_devices_share_what_a_load_may_take(
    ways: list[Late], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device had all of `max_memory` before."""
    monkeypatch.setattr(device_copies, "BLOCK_NBYTES", 16 << 20)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    reader = tensor_reader.TensorReader(Files(), 1 << 20, devices)
    reader.prepare([1 << 20] * 8)
    memory = reader._pinned
    assert memory is not None and memory.blocks().keys() == set(devices)
    assert sum(nbytes for _, nbytes in made.by) == 1 << 20
    share = reader._share()
    assert share.block_nbytes == memory.block_nbytes == (1 << 20) // THREADS // 2 // DEPTH
    reader.close()
    assert reader._pinned is None


def test_where_no_thread_can_be_started_it_is_made_here(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(device_copies, "lasting_memory", made.new)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = ReaderMemory([CPU], 2, BLOCK)
    assert [name for name, _ in made.by] == [threading.current_thread().name]
    assert len(memory.blocks()[CPU]) == 2
    memory.give_back()
    assert made.idle == [threading.current_thread().name]


def test_memory_of_registered_pages_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`let_go` of the whole memory: that of its first view would name the same address."""
    held: list[torch.Tensor] = []
    monkeypatch.setattr(reader_memory, "let_go", held.append)
    monkeypatch.setattr(reader_memory, "copies_pinned", lambda device: True)
    monkeypatch.setattr(
        device_copies, "lasting_memory", lambda n: torch.zeros(n, dtype=torch.uint8)
    )
    memory = ReaderMemory([CPU], 3, BLOCK)
    first = memory.blocks()[CPU][0].take(BLOCK).data_ptr()
    memory.give_back()
    while reader_memory._giving_back:
        reader_memory._giving_back.pop().join()
    assert [one.data_ptr() for one in held] == [first]
    assert registered_memory.COUNT.now == 0


def test_two_loads_at_once_wait_for_the_memory_that_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other load may remove a thread from the list while this one waits for it."""
    listed: list[threading.Thread] = []

    class TakenMeanwhile(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            listed.clear()

    for _ in range(2):
        thread = TakenMeanwhile(target=lambda: None)
        thread.start()
        listed.append(thread)
    monkeypatch.setattr(reader_memory, "_giving_back", listed)
    memory = ReaderMemory([], 1, BLOCK)
    assert memory.blocks() == {} and not listed
