"""Saves that come into the middle of gradient accumulation: refused, or the run goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import ckptmap
from ckptmap.errors import ArgumentError, LoadError
from tests.corpus.ranks import run_ranks
from tests.support.resume_model import batch, net


def accelerated(seed: int) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net(seed)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def micro_batch(accelerator: Accelerator, model: Any, optimizer: Any, number: int) -> None:
    with accelerator.accumulate(model):
        words = batch(number)
        logits = model(words[:, :-1]).flatten(0, 1)
        loss: Any = torch.nn.functional.cross_entropy(logits, words[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_accelerate_in_the_middle_and_after_a_step(tmp_path: Path) -> None:
    try:
        run = accelerated(0)
        for number in range(3):
            micro_batch(*run, number)
        _, model, optimizer = run
        with pytest.raises(ArgumentError, match="accelerate's sync_gradients is False") as no:
            ckptmap.save(tmp_path / "out", model, optimizer)
        assert no.value.code == "CKM518" and "gradients=True" in no.value.hint
        ckptmap.save(tmp_path / "out", model, optimizer, gradients=True).wait()
        ckptmap.save(tmp_path / "without", model, optimizer, gradients=False).wait()
        micro_batch(*run, 3)
        ckptmap.save(tmp_path / "after", model, optimizer).wait()  # nothing is pending now

        _, again, theirs = resumed = accelerated(1)
        resumed[0].step = 1  # what accelerate itself restores
        report = ckptmap.load(tmp_path / "out", again, theirs, exact=True)
        assert set(report.gradients) == {n for n, _ in model.named_parameters()}
        assert "pending gradients restored: " in str(report)
        assert any("accelerator.step" in note for note in report.notes)
        micro_batch(*resumed, 3)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
        with pytest.raises(LoadError, match="gradients of an accumulation were left out"):
            ckptmap.load(tmp_path / "without", again, theirs, exact=True)
        after = ckptmap.load(tmp_path / "after", again, theirs, exact=True)
        assert not after.gradients and not after.notes
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(True)


def test_gradients_that_lie_there_after_a_step(tmp_path: Path) -> None:
    """They are no accumulation; `gradients=True` saves them all the same, for any sharding."""
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0)).sum().backward()
    optimizer.step()
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    ckptmap.save(tmp_path / "all", model, optimizer, gradients=True).wait()
    assert not ckptmap.load(tmp_path / "out", net(1)).gradients
    ckptmap.convert(tmp_path / "all", tmp_path / "one.pt", to="full")
    for source in ("all", "one.pt"):
        again = net(1)
        again.layers.requires_grad_(False)
        report = ckptmap.load(tmp_path / source, again)
        assert report.gradients == ("embed.weight",)
        assert torch.equal(again.embed.weight.grad, model.embed.weight.grad)  # type: ignore[arg-type]
        assert any("up.weight: the parameter is frozen" in reason for reason in report.inexact)


def test_other_gradients_do_not_stay(tmp_path: Path) -> None:
    """The next backward would add to a gradient of the live model that was not there when it was saved."""
    model, again = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    (model.weight * torch.ones(3, 3)).sum().backward()
    ckptmap.save(tmp_path / "out", model, gradients=True).wait()
    again(torch.randn(2, 3)).sum().backward()
    report = ckptmap.load(tmp_path / "out", again, exact=True)
    assert report.gradients == ("weight",) and again.bias.grad is None
    assert torch.equal(again.weight.grad, torch.ones(3, 3))  # type: ignore[arg-type]


def test_ranks(tmp_path: Path) -> None:
    """DDP, FSDP1 and FSDP2, with and without reduction: tests/ranks/resume_gradients.py."""
    run_ranks("tests.ranks.resume_gradients", 2, [str(tmp_path)], timeout=240)
