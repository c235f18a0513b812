"""Large pinned memory: pages first, registered then. A stand-in takes the place of CUDA."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptmap.storage import pinned_memory, registered_memory
from ckptmap.storage.pinned_memory import Slabs
from ckptmap.storage.registered_memory import LEAST_NBYTES


class Cudart:
    """Remembers what is registered; answers with an error from `refuses` on."""

    def __init__(self, refuses: bool = False) -> None:
        self.held: dict[int, int] = {}
        self.refuses = refuses
        self.calls: list[tuple[str, int]] = []
        self.device = threading.local()

    def called(self, what: str) -> None:
        """Remember the call with the device that is current in its thread."""
        self.calls.append((what, getattr(self.device, "index", 0)))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1, "cudaHostRegisterPortable: every device may copy"
        self.called("register")
        if self.refuses:
            return 2
        self.held[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.called("unregister")
        del self.held[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_memory_is_registered_until_its_last_view_is_gone(cudart: Cudart) -> None:
    memory = registered_memory.registered_memory(LEAST_NBYTES + 4096)
    assert memory is not None and memory.dtype == torch.uint8
    assert cudart.held == {memory.data_ptr(): LEAST_NBYTES + 4096} and not memory.any()
    view = memory[4096:8192].view(torch.float32).fill_(2.5)
    del memory
    gc.collect()
    assert len(cudart.held) == 1 and view.sum() == 2560
    del view
    gc.collect()
    assert cudart.held == {}


def test_what_cuda_refuses_is_pinned_by_torch(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart.refuses = True
    assert registered_memory.registered_memory(LEAST_NBYTES) is None
    asked: list[tuple[int, ...]] = []

    def host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(shape)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(pinned_memory, "host_memory", host_memory)
    monkeypatch.setattr(pinned_memory, "_kept", {})
    slabs = Slabs.take([LEAST_NBYTES - 64, 100], pinned=True)
    assert sum(map(sum, asked)) >= LEAST_NBYTES + 64
    assert [slabs.place(number).numel() for number in (0, 1)] == [LEAST_NBYTES - 64, 100]


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostUnregister"])
def test_an_answer_with_an_error_is_not_kept_for_the_next_kernel(
    call: str, cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps the last error of a thread until somebody asks for it, and torch asks after each kernel: a save on a
    machine that registers no memory would end with the first kernel after it."""
    last = [0]

    def take() -> int:
        found, last[0] = last[0], 0
        return found

    def refuse(*_: object) -> int:
        last[0] = 801  # cudaErrorNotSupported
        return last[0]

    library = SimpleNamespace(
        cudaGetLastError=take, cudaThreadExchangeStreamCaptureMode=lambda mode: 0
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: library)
    monkeypatch.setattr(cudart, call, refuse)
    monkeypatch.setattr(registered_memory, "_kept", [])
    monkeypatch.setattr(registered_memory, "COUNT", registered_memory.RegisteredCount())
    memory = registered_memory.registered_memory(LEAST_NBYTES)
    assert (memory is None) == (call == "cudaHostRegister")
    del memory
    gc.collect()
    assert take() == 0


def test_slabs_that_are_too_large_are_given_back_without_a_wait(
    cudart: Cudart, devices: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are idle: a save that gave them back had waited for its copies. A wait would hold training up, and end the
    capture of a graph in another thread."""
    monkeypatch.setattr(pinned_memory, "_kept", {})
    Slabs.take([8 * LEAST_NBYTES], pinned=True).give_back()
    smaller = Slabs.take([LEAST_NBYTES], pinned=True)
    assert [call for call, _ in cudart.calls] == ["register", "unregister", "register"]
    assert cudart.held == {smaller.slabs[0].data_ptr(): LEAST_NBYTES}


@pytest.fixture
def devices(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Four devices; those in the set are used by the process, and a call on another one would use it, too."""
    used = {3}

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before = getattr(cudart.device, "index", 0)
        cudart.device.index = index
        yield
        cudart.device.index = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(cudart.device, "index", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: cudart.called(f"wait {index}"))
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda index: index in used, raising=False
    )
    return used


@pytest.mark.parametrize("what", ["a device is not waited for", "CUDA keeps it"])
def test_memory_that_cuda_does_not_let_go_stays_mapped(
    what: str, cudart: Cudart, devices: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was unmapped, and left registered where the wait had failed: what was mapped there next counted as pinned, and
    copies went to the pages of before."""

    def refuse(index: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    kept: list[Any] = []
    monkeypatch.setattr(registered_memory, "_kept", kept)
    if what == "CUDA keeps it":
        monkeypatch.setattr(cudart, "cudaHostUnregister", lambda address: 1)
    else:
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(registered_memory, "COUNT", registered_memory.RegisteredCount())
    memory = registered_memory.registered_memory(LEAST_NBYTES)
    assert memory is not None
    address = memory.data_ptr()
    memory.fill_(7)
    del memory
    gc.collect()
    assert [one.address for one in kept] == [address] and address in cudart.held
    assert bytes(kept[0][-4:]) == b"\x07" * 4, "it can be read still"
    assert registered_memory.COUNT.now == LEAST_NBYTES


def in_new_thread(run: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found.pop()


def test_a_new_thread_begins_to_use_no_other_device(cudart: Cudart, devices: set[int]) -> None:
    """Its current device is 0. Memory is registered, and given back, on one that the process uses."""
    memory = in_new_thread(lambda: registered_memory.registered_memory(LEAST_NBYTES))
    assert cudart.calls == [("register", 3)]
    held = [memory]
    del memory
    in_new_thread(held.clear)
    gc.collect()
    assert cudart.calls == [("register", 3), ("wait 3", 3), ("unregister", 3)]


def test_the_current_device_is_used_where_the_process_does_so(
    cudart: Cudart, devices: set[int]
) -> None:
    devices.add(1)
    cudart.device.index = 3
    memory = registered_memory.registered_memory(LEAST_NBYTES)
    cudart.device.index = 0
    devices.add(0)
    del memory
    gc.collect()
    waits = [("wait 0", 0), ("wait 1", 0), ("wait 3", 0)]
    assert cudart.calls == [("register", 3), *waits, ("unregister", 0)]


def test_memory_without_copies_waits_for_no_device(cudart: Cudart, devices: set[int]) -> None:
    memory = registered_memory.registered_memory(LEAST_NBYTES)
    assert memory is not None
    registered_memory.let_go(memory.narrow(0, 0, 64))
    registered_memory.let_go(torch.empty(64, dtype=torch.uint8))
    del memory
    gc.collect()
    assert cudart.calls == [("register", 3), ("unregister", 3)] and not cudart.held


def test_memory_is_made_beside_the_capture_of_a_graph(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's mode is relaxed for the call alone. A stand-in for CUDA's library holds the mode."""
    mode, seen, loaded = [0], list[int](), list[Any]()

    def exchange(given: Any) -> int:
        mode[0], given._obj.value = given._obj.value, mode[0]
        return 0

    def load(name: str, mode: int) -> SimpleNamespace:
        loaded.append((name, mode))
        return SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(cudart, "called", lambda what: seen.append(mode[0]))
    memory = registered_memory.registered_memory(LEAST_NBYTES)
    assert memory is not None and mode == [0]
    del memory
    gc.collect()
    assert seen == [registered_memory.RELAXED] * 2 and mode == [0]
    assert loaded == [("libcudart.so.13", registered_memory.os.RTLD_NOLOAD)] * 2

    def absent(name: str, mode: int) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert registered_memory.registered_memory(LEAST_NBYTES) is not None


def test_little_memory_and_that_of_other_devices_is_not_registered(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registered_memory.registered_memory(LEAST_NBYTES - 1) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert registered_memory.registered_memory(LEAST_NBYTES) is None
    assert cudart.held == {}


def test_an_address_space_that_is_too_small_is_no_error(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> SimpleNamespace:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(registered_memory, "_Registered", refuse)
    assert registered_memory.registered_memory(LEAST_NBYTES) is None
