"""Numbers that modules keep in plain attributes: a run goes on bit for bit only where they are as they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.model import plain_attributes
from tests.support.resume_optimizers import step_at_random


class Moving(nn.Linear):
    """Keeps a count, a moving average and, once it has run, what it has seen."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls, self.average, self._runs = 0, 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self._runs += 1
        self.average *= 0.9
        self.seen = x.numel()
        return super().forward(x) * self.average


class Kept(Moving):
    """As it, with extra state."""

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "average": self.average}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.average = state["calls"], state["average"]


def made(cls: type[nn.Module] = Moving) -> tuple[nn.Module, Any]:
    model = nn.Sequential(cls(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_numbers_that_training_moves_are_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    with pytest.raises(LoadError, match="3 attributes of modules not as when it was saved") as no:
        ckptmap.load(tmp_path / "out", *made(), exact=True)
    assert no.value.code == "CKM507" and "\n" not in no.value.message
    for text in (
        "Moving.calls: was 1, is 0",
        "average: was 0.9, is 1.0",
        "seen: was 8, is not there",
    ):
        assert text in no.value.message, text
    again, theirs = made()
    assert any(
        "Moving.calls" in text for text in ckptmap.load(tmp_path / "out", again, theirs).inexact
    )


def test_the_next_step_of_the_refusal_works(tmp_path: Path) -> None:
    """Set before load, or saved as extra state."""
    model, optimizer = made()
    train(model, optimizer)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again, theirs = made()
    again[0].calls, again[0].average, again[0].seen = 1, 0.9, 8  # type: ignore[index,union-attr]
    assert not ckptmap.load(tmp_path / "out", again, theirs, exact=True).inexact
    model, optimizer = made(Kept)
    train(model, optimizer)
    ckptmap.save(tmp_path / "kept", model, optimizer).wait()
    again, theirs = made(Kept)
    ckptmap.load(tmp_path / "kept", again, theirs, exact=True)
    for run in ((model, optimizer), (again, theirs)):
        torch.manual_seed(3)
        train(*run)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**30, -0.0, 5e-324])
def test_any_number_is_told(value: float, tmp_path: Path) -> None:
    model, _ = made()
    model[0].calls = value  # type: ignore[index,union-attr]
    ckptmap.save(tmp_path / "out", model).wait()
    ckptmap.load(tmp_path / "out", model, exact=True)
    with pytest.raises(LoadError, match=r"Moving\.calls"):
        ckptmap.load(tmp_path / "out", made()[0], exact=True)


def test_many_modules_are_told_by_class() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    told = plain_attributes.described(model)["Linear"]
    del told[plain_attributes.NAMES]
    assert told == {"in_features": "4", "out_features": "4"}
    model[1].out_features = 5  # type: ignore[union-attr,assignment]
    told = plain_attributes.described(model)["Linear"]
    assert told["in_features"] == "4" and told["out_features"].endswith(" of 3 modules")
    step_at_random(model, torch.optim.SGD(model.parameters()))
    assert not [*plain_attributes.changed({"Linear": told, "Other": {"x": "1"}}, model)]


def test_other_modules_say_nothing_and_wrappers_are_none() -> None:
    """A stage of a pipeline has a part of the modules; torch.compile and an average hold them."""
    model = nn.Sequential(Moving(), nn.Linear(4, 5))
    saved = plain_attributes.described(model)
    assert not [
        *plain_attributes.changed(saved, nn.Sequential(Moving(), Moving(), nn.Linear(9, 9)))
    ]
    assert plain_attributes.described(torch.compile(model)) == saved  # type: ignore[arg-type]
    model[0].calls = 1  # type: ignore[union-attr,assignment]
    (text,) = plain_attributes.changed(saved, torch.compile(model))  # type: ignore[arg-type]
    assert "Moving.calls: was 0, is 1" in text


def test_a_number_that_only_a_run_sets_is_missed() -> None:
    """In a class that has no other."""
    model = nn.Sequential(nn.ReLU())
    model[0].seen = 8  # type: ignore[union-attr,assignment]
    (text,) = plain_attributes.changed(plain_attributes.described(model), nn.Sequential(nn.ReLU()))
    assert "ReLU.seen: was 8, is not there" in text
