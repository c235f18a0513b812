"""Random streams of a rank whose model is on several GPUs, with a torch.cuda that only pretends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckptmap.errors import LoadError
from ckptmap.live.model import rng_state


class OnThree(nn.Module):
    """Its weights are on the GPUs 0 and 2, a buffer on 1, and one on the CPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        for name in ("cuda:0", "cuda:2", "cpu", "cuda:2"):
            yield SimpleNamespace(device=torch.device(name))

    def buffers(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("cuda:1"))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The state of each GPU's generator, of which number 1 is the current one."""
    held = [torch.full((16,), number, dtype=torch.uint8) for number in range(3)]

    def place(device: Any) -> int:
        return 1 if device == "cuda" else int(device)

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        held[place(device)] = state.clone()

    stands_in = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 1,
        "get_rng_state": lambda device="cuda": held[place(device)].clone(),
        "set_rng_state": set_state,
    }
    for name, function in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return held


def test_streams_of_every_gpu_of_the_model_come_back(streams: list[torch.Tensor]) -> None:
    kept = rng_state.captured(OnThree())
    assert [name for name in kept if name.startswith("cuda")] == ["cuda", "cuda0", "cuda2"]
    assert [name for name in rng_state.captured() if name.startswith("cuda")] == ["cuda"]
    wanted = [state.clone() for state in streams]
    for state in streams:
        state.zero_()
    rng_state.restore(kept)
    assert all(torch.equal(a, b) for a, b in zip(wanted, streams, strict=True))


def test_a_stream_of_a_gpu_that_is_not_here_is_refused(streams: list[torch.Tensor]) -> None:
    kept = rng_state.captured(OnThree()) | {"cuda7": streams[0]}
    with pytest.raises(LoadError, match="not one of this torch: list") as refused:
        rng_state.restore(kept)
    assert refused.value.code == "CKM511"


class OnOther(nn.Module):
    """Its weights are on accelerators that are no GPU of NVIDIA's."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = places

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from (SimpleNamespace(device=torch.device(name)) for name in self.places)


def test_streams_of_every_accelerator_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of CUDA were kept, and `exact` promised a run with dropout on an XPU all the same."""
    held = {
        (kind, number): torch.full((16,), value, dtype=torch.uint8)
        for value, (kind, number) in enumerate([("xpu", 0), ("xpu", 1), ("mps", None)])
    }

    def module(kind: str, **more: Any) -> SimpleNamespace:
        def place(number: Any) -> tuple[str, Any]:
            return kind, more["current_device"]() if number is None and more else number

        return SimpleNamespace(
            is_available=lambda: True,
            get_rng_state=lambda number=None: held[place(number)].clone(),
            set_rng_state=lambda state, number=None: held.update({place(number): state}),
            **more,
        )

    modules = {
        "xpu": module("xpu", current_device=lambda: 1),
        "mps": module("mps"),
        "npu": SimpleNamespace(is_available=lambda: True),
    }

    def get_device_module(kind: str) -> SimpleNamespace:
        if kind not in modules:
            raise RuntimeError(f"Invalid device module '{kind}'")
        return modules[kind]

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    model = OnOther("xpu:0", "xpu:1", "mps:0", "cpu", "meta", "privateuseone:0")
    kept = rng_state.captured(model)
    assert [*kept][3:] == ["xpu", "xpu0", "mps"]
    wanted = dict(held)
    held.update({place: state * 0 + 9 for place, state in wanted.items()})
    rng_state.restore(kept)
    assert all(torch.equal(held[place], wanted[place]) for place in wanted)
    kinds = ["cpu", "mps", "npu", "xpu"]
    assert rng_state.not_recorded(kept, kinds) == ["npu"]
