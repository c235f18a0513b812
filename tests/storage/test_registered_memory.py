"""Large pinned memory: pages first, registered then. A stand-in takes the place of CUDA."""

from __future__ import annotations

import gc
from types import SimpleNamespace

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

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        if self.refuses:
            return 2
        self.held[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
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
    assert [place.numel() for place in slabs.places] == [LEAST_NBYTES - 64, 100]


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
