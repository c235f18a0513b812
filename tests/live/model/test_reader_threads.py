"""Tensors are filled side by side, and the outcome is that of one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import CkptmapError, SourceError
from ckptmap.live.model import reader_memory, reader_threads, tensor_reader
from ckptmap.live.model.reader_memory import ReaderMemory
from ckptmap.storage import device_copies
from ckptmap.storage.files import Files
from tests.support.late_device import one_late_a_thread

CPU = torch.device("cpu")


def threads_of(count: int, devices: Sequence[torch.device] = ()) -> reader_threads.ReaderThreads:
    return reader_threads.ReaderThreads(count, devices, ReaderMemory(devices, count, 4096))


def in_order(jobs: list[Any], count: int, devices: tuple[torch.device, ...] = ()) -> Iterator[Any]:
    with closing(threads_of(count, devices)) as threads:
        yield from threads.in_order(jobs)


def test_results_come_in_order_from_several_threads() -> None:
    seen: set[int] = set()
    together = threading.Barrier(3, timeout=60)

    def job(number: int) -> int:
        seen.add(threading.get_ident())
        together.wait()  # three jobs run at a time, or this fails
        time.sleep(0.002 * (3 - number % 3))
        assert not torch.is_grad_enabled() and torch.get_num_threads() == 1
        return number

    before = torch.get_num_threads()
    jobs = [lambda number=number: job(number) for number in range(30)]
    assert list(in_order(jobs, 3)) == list(range(30))
    assert len(seen) == 3 and torch.is_grad_enabled() and torch.get_num_threads() == before


def test_jobs_begin_with_the_largest_and_results_stay_in_order() -> None:
    begun: list[int] = []
    jobs = [lambda number=number: begun.append(number) or number for number in range(5)]
    with closing(threads_of(1)) as threads:
        assert list(threads.in_order(jobs, [3, 9, 1, 9, 5])) == list(range(5))
    assert begun == [1, 3, 4, 0, 2]


def test_as_many_threads_as_have_enough_to_do() -> None:
    mib = 1 << 20
    assert reader_threads.that_pay(16, [256 * mib] * 16) == 16
    assert reader_threads.that_pay(16, [256 * mib] * 4 + [1 << 14] * 8) == 4, "no more than tensors"
    assert reader_threads.that_pay(16, [256 * mib] * 4 + [1 << 14] * 8, shared=True) == 8
    assert reader_threads.that_pay(16, [mib] * 1024) == 8
    assert reader_threads.that_pay(16, [mib] * 100) == reader_threads.that_pay(16, []) == 1


def test_blocks_of_all_threads_are_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    ways = one_late_a_thread(monkeypatch)
    new = device_copies.lasting_memory
    monkeypatch.setattr(device_copies, "lasting_memory", lambda n: made.append(n) or new(n))
    for module in (reader_memory, tensor_reader):
        monkeypatch.setattr(module, "copies_pinned", lambda device: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Streams)
    reader = tensor_reader.TensorReader(Files(), 32 << 20, [CPU])
    monkeypatch.setattr(reader, "threads", 2)
    together = threading.Barrier(2, timeout=60)

    def step(its: tensor_reader.TensorReader) -> int:
        together.wait()
        device_copies.bound_blocks(CPU, its.max_memory, directions=1)
        way = device_copies.lanes(CPU)
        assert way is not None and its.max_memory == 16 << 20
        return way.blocks("up").take(4096).data_ptr()

    with closing(reader):
        places = list(reader.run_all([step, step], [128 << 20, 128 << 20]))
    assert made == [32 << 20] and len(ways) == 2
    assert abs(places[0] - places[1]) == 16 << 20


class Streams:
    current_stream = set_stream = staticmethod(lambda stream: stream)


def test_an_error_ends_it_and_what_has_not_begun_never_runs() -> None:
    ran: list[int] = []

    def job(number: int) -> int:
        ran.append(number)
        if number == 4:
            raise ValueError("the fifth")
        time.sleep(0.001)
        return number

    jobs = [lambda number=number: job(number) for number in range(1000)]
    taken: list[int] = []
    with pytest.raises(ValueError, match="the fifth"):
        for number in in_order(jobs, 2):
            taken.append(number)
    assert taken == [0, 1, 2, 3] and len(ran) < 500


def test_threads_work_on_the_streams_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    local = threading.local()
    module = SimpleNamespace(
        current_stream=lambda device: getattr(local, "stream", f"default of {device}"),
        set_stream=lambda stream: setattr(local, "stream", stream),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device("cuda", 1)
    local.stream = "side"
    found = list(in_order([lambda: module.current_stream(device)] * 4, 2, (device,)))
    assert found == ["side"] * 4


def test_a_device_has_several_threads_and_a_cpu_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_threads, "copies_pinned", lambda device: device.type == "cuda")
    monkeypatch.setattr(reader_threads.os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    device = [torch.device("cuda", 0)]
    assert reader_threads.count_for([], 1 << 30) == reader_threads.count_for([CPU], 1 << 30) == 1
    assert reader_threads.count_for(device, 256 << 20) == reader_threads.MOST
    assert reader_threads.count_for(device, 48 << 20) == 3
    assert reader_threads.count_for(device, 1) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert reader_threads.count_for(device, 256 << 20) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert reader_threads.count_for(device, 256 << 20) == reader_threads.MOST


# ------------------------------------------------------------------------------- whole loads


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    for _ in range(2):
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()["state"]
    moments = {f"{n}.{name}": value for n, one in state.items() for name, value in one.items()}
    return {**model.state_dict(), **moments}


def test_a_load_by_threads_is_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(1)
    ckptmap.save(tmp_path / "saved", model, optimizer, step=2, background=False)
    monkeypatch.setattr(reader_threads, "LEAST_WORK", 1)
    used: set[str] = set()
    monkeypatch.setattr(
        reader_threads,
        "_without_gradients",
        lambda job, run=reader_threads._without_gradients: (
            used.add(threading.current_thread().name) or run(job)
        ),
    )
    reports, orders = [], []
    for threads in (1, 3):
        monkeypatch.setattr(
            tensor_reader, "count_for", lambda devices, memory, count=threads: count
        )
        other, its = build(2)
        reports.append(ckptmap.load(tmp_path / "saved", other, its, exact=True))
        orders.append([id(p) for p in its.state] == [id(p) for p in other.parameters()])
        wanted, found = tensors(model, optimizer), tensors(other, its)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    assert reports[0].loaded == reports[1].loaded and reports[0].state == reports[1].state
    assert orders == [True, True] and len(used) > 1


def test_an_error_in_a_thread_tells_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build(1)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    monkeypatch.setattr(tensor_reader, "count_for", lambda devices, memory: 3)
    monkeypatch.setattr(reader_threads, "LEAST_WORK", 1)
    read, count = Files.read_into, [0]

    def failing(self: Files, file: str, *rest: Any, **more: Any) -> None:
        count[0] += 1
        if threading.current_thread() is not threading.main_thread() and count[0] > 5:
            raise SourceError("CKM101", f"{file}: cannot be read", "check the disk")
        read(self, file, *rest, **more)

    monkeypatch.setattr(Files, "read_into", failing)
    with pytest.raises(
        CkptmapError, match=r"half loaded, \d+ of 24 tensors.* and others may be in"
    ):
        ckptmap.load(tmp_path / "weights.pt", build(2)[0], verify="none")
