"""torchao's CPUOffloadOptimizer: one optimizer a parameter, each on a copy in host memory.

It is for GPUs alone: it takes its streams from the module of its device, `torch.cuda` or `torch.xpu`.
Here all of its own code runs with `torch.cpu` in that place, whose streams do nothing. What is not
shown so: that copies on a side stream are waited for, pinned memory, and `record_stream`, which keeps
freed gradients (`offload_gradients=True`); no value depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.live.rounding import install
from tests.support.resume_model import net, train


class Stream(torch.cpu.Stream):
    """torch.cpu's own says nothing of events."""

    def record_event(self) -> Any:
        return torch.cpu.Event()

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torchao.optim import cpu_offload

    empty_like = torch.empty_like
    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cpu", "xpu"])
    monkeypatch.setattr(torch.xpu, "Stream", Stream)
    monkeypatch.setattr(torch.xpu, "current_stream", torch.cpu.current_stream)
    monkeypatch.setattr(torch.xpu, "stream", torch.cpu.stream)
    monkeypatch.setattr(torch, "empty_like", lambda *a, pin_memory=False, **k: empty_like(*a, **k))
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def adamw() -> tuple[Any, dict[str, Any]]:
    return torch.optim.AdamW, {}


def rounding() -> tuple[Any, dict[str, Any]]:
    from torchao.optim import AdamW8bit

    return AdamW8bit, {"bf16_stochastic_round": True}


def run(seed: int, inner: Any = adamw, lr: float = 1e-2) -> tuple[Any, Any]:
    """Two groups, the first one's learning rate; bf16 where the optimizer rounds into it."""
    from torchao.optim import CPUOffloadOptimizer

    cls, options = inner()
    model = net(seed, torch.bfloat16 if options else torch.float32)
    groups = [{"params": model.embed.parameters(), "lr": lr}, {"params": model.layers.parameters()}]
    return model, CPUOffloadOptimizer(groups, cls, lr=1e-2, **options)


@pytest.mark.parametrize("inner", [adamw, rounding])
def test_it_goes_on_bit_for_bit(inner: Any, tmp_path: Path) -> None:
    model, optimizer = run(0, inner, lr=2e-2)
    assert optimizer.d_opt is not None and optimizer.optim_dict  # small ones stay on the device
    train(model, optimizer, 0, 3)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    train(model, optimizer, 3, 5)
    again, theirs = run(1, inner, lr=2e-2)
    report = ckptmap.load(tmp_path / "out", again, theirs, exact=True)
    assert report.state is not None and not report.state.initialised
    for device, host in theirs.param_d2h_map.items():
        assert torch.equal(device, host)
    train(again, theirs, 3, 5)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_rounding_by_position_is_that_of_an_ordinary_one(tmp_path: Path) -> None:
    """Where a weight is stepped does not matter: the copies in host memory have the names of the model's
    parameters. Ten steps, also with a save after four."""
    plain = net(0, torch.bfloat16)
    cls, options = rounding()
    ordinary = cls(plain.parameters(), lr=1e-2, **options)
    install(ordinary, seed=3, model=plain)
    train(plain, ordinary, 0, 10)
    model, optimizer = run(0, rounding)
    installed = install(optimizer, seed=3, model=model)
    train(model, optimizer, 0, 4)
    ckptmap.save(tmp_path / "four", model, optimizer).wait()
    train(model, optimizer, 4, 10)
    again, theirs = run(1, rounding)
    other = install(theirs, seed=5, model=again)
    report = ckptmap.load(tmp_path / "four", again, theirs, exact=True)
    assert report.rounding == "by position, seed 3, was 5" and other.seed == 3
    train(again, theirs, 4, 10)
    for name, want in plain.named_parameters():
        for one in (model, again):
            assert torch.equal(one.get_parameter(name), want), name
    for one in (installed, other):
        one.uninstall()
    assert all("step" not in vars(inner) for inner in optimizer.optim_dict.values())


def test_from_and_into_an_ordinary_one(tmp_path: Path) -> None:
    """State is by name: where it was computed does not matter."""
    model, optimizer = run(0)
    train(model, optimizer, 0, 2)
    ckptmap.save(tmp_path / "offloaded", model, optimizer).wait()
    plain = net(1)
    adamw = torch.optim.AdamW(plain.parameters(), lr=9.0, fused=True)
    ckptmap.load(tmp_path / "offloaded", plain, adamw)
    assert adamw.param_groups[0]["lr"] == 1e-2
    ckptmap.save(tmp_path / "plain", plain, adamw).wait()
    again, theirs = run(2)
    ckptmap.load(tmp_path / "plain", again, theirs)
    for one in (train(plain, adamw, 2, 4), train(again, theirs, 2, 4)):
        assert one == train(*_copy(tmp_path / "offloaded"), 2, 4)


def _copy(path: Path) -> tuple[Any, Any]:
    model, optimizer = run(3)
    ckptmap.load(path, model, optimizer)
    return model, optimizer
