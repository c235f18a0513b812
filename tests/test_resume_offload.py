"""torchao's CPUOffloadOptimizer: one optimizer a parameter, each on a copy in host memory.

It is for GPUs alone. Here its own code runs on the CPU: what it asks of CUDA (streams, events, pinned
memory) only orders copies, and is replaced by nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from tests.live.resume_model import net, train


class Stream:
    """Everything that was asked of it is done already."""

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.optim import cpu_offload

    empty_like = torch.empty_like
    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cuda"])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch, "empty_like", lambda *a, pin_memory=False, **k: empty_like(*a, **k))


def run(seed: int) -> tuple[Any, Any]:
    from torchao.optim import CPUOffloadOptimizer

    model = net(seed)
    return model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = run(0)
    assert optimizer.d_opt is not None and optimizer.optim_dict  # small ones stay on the device
    train(model, optimizer, 0, 3)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    train(model, optimizer, 3, 5)
    again, theirs = run(1)
    report = ckptmap.load(tmp_path / "out", again, theirs, exact=True)
    assert report.state is not None and not report.state.initialised
    for device, host in theirs.param_d2h_map.items():
        assert torch.equal(device, host)
    train(again, theirs, 3, 5)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


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
