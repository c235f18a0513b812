"""Every entry of an optimizer's state comes back as it was, or `exact=True` refuses: entries that begin late
or end, dicts and lists of plain values, None, entries beside those of a known optimizer, keys that are no
parameters, wrappers and classes that keep state elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from tests.corpus.ranks import run_alone, run_ranks
from tests.support.odd_optimizers import REFUSED, RESTORED, Late, Odd, OwnKeys, Sam, state_of


def made(build: Callable[[Any], Any], seed: int, steps: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, bias=False))
    optimizer = build(model.parameters())
    train(model, optimizer, 0, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("steps_here", [0, 1, 4])
@pytest.mark.parametrize("name", RESTORED)
def test_it_comes_back_as_it_was(name: str, steps_here: int, tmp_path: Path) -> None:
    """Also into an optimizer that has stepped, less or more often than the saved one."""
    model, optimizer = made(RESTORED[name], 0, 3)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again, theirs = made(RESTORED[name], 1, steps_here)
    report = ckptmap.load(tmp_path / "out", again, theirs, exact=True)
    assert report.changes == () and report.inexact == ()
    assert state_of(again, theirs) == state_of(model, optimizer)
    train(model, optimizer, 3, 6)
    train(again, theirs, 3, 6)
    assert state_of(again, theirs) == state_of(model, optimizer)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(ours, other) for ours, other in pairs)


def test_what_is_read_twice_is_not_shared(tmp_path: Path) -> None:
    """An optimizer changes lists in place: two that load from one open checkpoint have two of them."""
    build = RESTORED["Nested"]
    ckptmap.save(tmp_path / "out", *made(build, 0, 2)).wait()
    with ckptmap.open(tmp_path / "out") as ckpt:
        pairs = [made(build, 1, 0) for _ in range(2)]
        for pair in pairs:
            ckptmap.load(ckpt, *pair)
    before = state_of(*pairs[1])
    train(*pairs[0], 2, 3)
    assert state_of(*pairs[1]) == before


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_saved_is_never_exact(name: str, tmp_path: Path) -> None:
    build, reason = REFUSED[name]
    model, optimizer = made(build, 0, 3)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again, theirs = made(build, 1, 0)
    before = [param.detach().clone() for param in again.parameters()]
    with pytest.raises(LoadError, match=reason) as refused:
        ckptmap.load(tmp_path / "out", again, theirs, exact=True)
    assert refused.value.code == "CKM507"
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), before, strict=True))
    report = ckptmap.load(tmp_path / "out", again, theirs)
    assert any(reason in text for text in report.inexact)


def test_a_state_dict_of_its_own_goes_beside_it(tmp_path: Path) -> None:
    """The note of the save says how."""
    model, optimizer = made(OwnKeys, 0, 3)
    notes = ckptmap.save(tmp_path / "a", model, optimizer).wait()
    assert any("save it as stateful=" in note for note in notes), notes
    ckptmap.save(tmp_path / "b", model, optimizer, stateful={"optimizer": optimizer}).wait()
    again, theirs = made(OwnKeys, 1, 0)
    ckptmap.load(tmp_path / "b", again, theirs, stateful={"optimizer": theirs}, exact=True)
    assert theirs.rounds == optimizer.rounds == 9
    assert state_of(again, theirs) == state_of(model, optimizer)


def test_an_optimizer_inside_another_goes_beside_it(tmp_path: Path) -> None:
    model, optimizer = made(Sam, 0, 3)
    inside = {"base": optimizer.base_optimizer}
    ckptmap.save(tmp_path / "out", model, optimizer, stateful=inside).wait()
    again, theirs = made(Sam, 1, 0)
    inside = {"base": theirs.base_optimizer}
    ckptmap.load(tmp_path / "out", again, theirs, stateful=inside, exact=True)
    assert state_of(again, theirs.base_optimizer) == state_of(model, optimizer.base_optimizer)


def test_an_entry_of_another_class_is_not_taken(tmp_path: Path) -> None:
    """What one class keeps is of no use to another, and is told of."""
    model, optimizer = made(Late, 0, 3)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again, theirs = made(Odd, 1, 0)
    report = ckptmap.load(tmp_path / "out", again, theirs)
    assert report.state is not None and "0.weight.slow" in report.state.left
    assert "0.weight.slow: not loaded" in report.inexact
    assert [*theirs.state[next(again.parameters())]] == ["n"]


def grouped(**group: Any) -> Callable[[Any], Any]:
    return lambda params: torch.optim.AdamW([{"params": [*params], **group}])


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({}, {"scale": 0.5}, "group 0 scale: is 0.5, was not there"),
        ({"plan": [1, 2]}, {"plan": None}, r"group 0 plan: was \[1, 2\], is None"),
        ({"plan": [1, 2, 3]}, {"plan": [1, 2]}, r"group 0 plan: was \[1, 2, 3\], is \[1, 2\]"),
    ],
)
def test_groups_of_other_keys_are_never_exact(
    before: dict[str, Any], after: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    ckptmap.save(tmp_path / "out", *made(grouped(**before), 0, 2)).wait()
    with pytest.raises(LoadError, match=reason):
        ckptmap.load(tmp_path / "out", *made(grouped(**after), 1, 0), exact=True)
    ckptmap.load(tmp_path / "out", *made(grouped(**before), 1, 0), exact=True)


def test_a_list_of_a_scheduler_keeps_its_length(tmp_path: Path) -> None:
    """The live scheduler was built for another plan: the saved one is restored, not cut to its length."""

    def built(milestones: list[int]) -> tuple[nn.Module, Any, Any]:
        model, optimizer = made(torch.optim.SGD, 0, 1)
        pieces = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in (*milestones, 0)]
        return (
            model,
            optimizer,
            torch.optim.lr_scheduler.SequentialLR(optimizer, pieces, milestones),
        )

    model, optimizer, scheduler = built([2, 5])
    scheduler._milestones = [2, 5, 9]
    ckptmap.save(tmp_path / "out", model, optimizer, scheduler).wait()
    model, optimizer, scheduler = built([2, 5])
    ckptmap.load(tmp_path / "out", model, optimizer, scheduler, exact=True)
    assert scheduler._milestones == [2, 5, 9]


def test_on_two_ranks_and_then_on_one(tmp_path: Path) -> None:
    wraps = ["ddp", "fsdp2", "fsdp1", "fsdp1-flat"]
    run_ranks("tests.ranks.resume_entries", 2, [str(tmp_path), *wraps], 240)
    run_alone("tests.ranks.resume_entries", [str(tmp_path), "from", "fsdp2"], timeout=120)


def test_an_optimizer_whose_ranks_keep_parts(tmp_path: Path) -> None:
    """Its state was left out, and `exact=True` passed."""
    run_ranks("tests.ranks.resume_partitioned", 3, [str(tmp_path)], 120)
    run_ranks("tests.ranks.resume_partitioned", 2, [str(tmp_path), "from"], 120)
    run_alone("tests.ranks.resume_partitioned", [str(tmp_path), "from", "alone"], timeout=60)


def test_the_count_of_an_averager_beside_the_optimizer(tmp_path: Path) -> None:
    """PostLocalSGDOptimizer, and communication hooks: tests/ranks/resume_local_sgd.py."""
    run_ranks("tests.ranks.resume_local_sgd", 2, [str(tmp_path)], 120)


def test_a_scheduler_of_another_class_is_never_exact(tmp_path: Path) -> None:
    """LambdaLR and MultiplicativeLR have states of the same names."""

    def built(kind: Any, inside: bool) -> tuple[nn.Module, Any, Any]:
        model, optimizer = made(torch.optim.SGD, 0, 1)
        scheduler = kind(optimizer, lambda step: 0.5)
        if inside:
            constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
            scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, scheduler], [2])
        return model, optimizer, scheduler

    one, other = torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR
    for inside in (False, True):
        ckptmap.save(tmp_path / str(inside), *built(one, inside)).wait()
        ckptmap.load(tmp_path / str(inside), *built(one, inside), exact=True)
        with pytest.raises(LoadError, match=r"scheduler: was \[.*LambdaLR.*is \[.*Multiplicative"):
            ckptmap.load(tmp_path / str(inside), *built(other, inside), exact=True)


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps where no state dict has them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.count, self.slope, self.ready = 0, 0.5, False

    def step(self, closure: Any = None) -> Any:
        self.count, self.ready = self.count + 1, True
        for group in self.param_groups:
            group["lr"] = self.slope / self.count
        return super().step(closure)


class Telling(Counting):
    """The same, with a state dict that has the count."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})


@pytest.mark.parametrize("build", [Counting, Telling])
def test_a_count_that_no_state_dict_has_is_refused(build: Any, tmp_path: Path) -> None:
    model, again = (torch.nn.Linear(2, 2) for _ in range(2))
    optimizer, theirs = build(model.parameters()), build(again.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckptmap.save(tmp_path / "a", model, optimizer, stateful={"optimizer": optimizer}).wait()
    inside = {"optimizer": theirs}
    if build is Counting:
        text = r"optimizer\.count, which is not in its state dict: was 1, is 0"
        with pytest.raises(LoadError, match=text):
            ckptmap.load(tmp_path / "a", again, theirs, stateful=inside, exact=True)
        theirs.count = 1
    ckptmap.load(tmp_path / "a", again, theirs, stateful=inside, exact=True)
    assert theirs.count == 1 and torch.equal(model.weight, again.weight)
