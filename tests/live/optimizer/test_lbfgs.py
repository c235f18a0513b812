"""torch's LBFGS, whose state is vectors over all parameters: it goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from tests.corpus.ranks import run_ranks


def built(seed: int, lr: float = 0.1) -> tuple[nn.Module, torch.optim.LBFGS]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=4, history_size=12)


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    def loss_of(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    losses = []
    for step in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        losses.append(float(optimizer.step(lambda x=x: loss_of(x))))
    return losses


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Also past 10 vectors, whose numbers as text are not in order, and after a conversion."""
    model, optimizer = built(0)
    train(model, optimizer, 0, 4)
    assert len(optimizer.state[model[0].weight]["old_dirs"]) > 10  # type: ignore[index]
    ckptmap.save(tmp_path / "c", model, optimizer).wait()
    losses = train(model, optimizer, 4, 7)
    again, theirs = built(1, lr=0.5)
    report = ckptmap.load(tmp_path / "c", again, theirs, exact=True)
    assert report.inexact == () and report.extra == {} and report.state is not None
    assert "0.weight.old_dirs" in report.state.loaded
    assert train(again, theirs, 4, 7) == losses
    ckptmap.convert(tmp_path / "c", tmp_path / "full.pt", to="full")
    again, theirs = built(1)
    ckptmap.load(tmp_path / "full.pt", again, theirs)
    assert train(again, theirs, 4, 7) == losses


def test_other_parameters(tmp_path: Path) -> None:
    model, optimizer = built(0)
    train(model, optimizer, 0, 2)
    ckptmap.save(tmp_path / "c", model, optimizer).wait()
    turned = torch.optim.LBFGS([*model.parameters()][::-1])
    with pytest.raises(LoadError, match=r"does not match.*1 missing: 2\.bias"):
        ckptmap.load(tmp_path / "c", model, turned)
    report = ckptmap.load(tmp_path / "c", model, turned, strict=False)
    assert report.state is not None and not turned.state
    assert "2.bias: the checkpoint has none" in report.state.initialised


def test_ranks(tmp_path: Path) -> None:
    """FSDP2 and DDP at two ranks, then FSDP1, which is refused: tests/ranks/lbfgs.py. One process then
    goes on from the FSDP2 checkpoint."""
    run_ranks("tests.ranks.lbfgs", 2, [str(tmp_path)], timeout=240)
    model, optimizer = built(1)
    report = ckptmap.load(tmp_path / "fsdp2", model, optimizer)
    assert report.state is not None and "0.weight.d" in report.state.loaded
    train(model, optimizer, 4, 5)
