"""Keys that a run puts into a group of its optimizer: an optimizer of the same class gets them back as they were,
as torch's own `load_state_dict` does; what no checkpoint holds is told of, and compared by its text."""

from __future__ import annotations

import math
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from tests.support.resume_optimizers import step_at_random


class Mode(Enum):
    FAST = 1
    SLOW = 2


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Norm(str, Enum):  # noqa: UP042  # its str() is not its value
    ROWS = "rows"
    ALL = "all"


def run(seed: int, **keys: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "lr": 1e-2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    optimizer.param_groups[0].update(keys)
    step_at_random(model, optimizer, 1)
    return model, optimizer


def resumed(path: Path, **keys: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    model, optimizer = run(1, **keys)
    report = ckptmap.load(path, model, optimizer, exact=True)
    first, second = optimizer.param_groups
    return first, second, report


ADDED: dict[str, tuple[Any, Any]] = {
    "number": (0.5, 0.25), "integer": (3, 2), "text": ("body", "head"), "flag": (True, False),
    "none": (None, None), "list": ([1, 2.5], [0, 0]), "tuple": ((1, 2), (3, 4)),
    "dict": ({"a": 1, "b": [2]}, {"a": 2, "b": [3]}), "tensor": (torch.tensor(0.5), torch.tensor(0.0)),
    "tensor of several": (torch.arange(3.0), torch.zeros(3)),
    "tensors in a dict": ({"t": torch.arange(3)}, {"t": torch.zeros(3, dtype=torch.int64)}),
    "tensor of another shape": (torch.arange(3.0), torch.zeros(2)),
}  # fmt: skip


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("name", ADDED)
def test_a_key_comes_back_whether_it_is_there_or_not(name: str, tmp_path: Path) -> None:
    saved, other = ADDED[name]
    ckptmap.save(tmp_path / "c", *run(0, mine=saved)).wait()
    for keys in ({}, {"mine": other}):
        first, second, report = resumed(tmp_path / "c", **keys)
        assert alike(saved, first["mine"]), first["mine"]
        assert "mine" not in second and not report.inexact
    assert any("mine: was" in text for text in report.state.settings) or alike(saved, other)


@pytest.mark.parametrize(("saved", "other"), [(Level.HIGH, Level.LOW), (Norm.ROWS, Norm.ALL)])
def test_a_member_of_an_enum_of_numbers_or_texts_comes_back_as_one(
    saved: Any, other: Any, tmp_path: Path
) -> None:
    ckptmap.save(tmp_path / "c", *run(0, mine=saved)).wait()
    first, _, report = resumed(tmp_path / "c", mine=saved)
    assert first["mine"] is saved and not report.inexact
    model, optimizer = run(1, mine=other)
    ckptmap.load(tmp_path / "c", model, optimizer)
    assert optimizer.param_groups[0]["mine"] is saved


def test_a_nan_is_the_same_nan(tmp_path: Path) -> None:
    ckptmap.save(tmp_path / "c", *run(0, mine=math.nan)).wait()
    first, _, report = resumed(tmp_path / "c", mine=math.nan)
    assert math.isnan(first["mine"]) and not report.state.settings


def test_a_number_of_numpy_keeps_its_class(tmp_path: Path) -> None:
    """It was left as the live optimizer had it, and `exact` said nothing."""
    ckptmap.save(tmp_path / "c", *run(0, lr=numpy.float32(0.1), mine=[numpy.int64(3)])).wait()
    first, _, _ = resumed(tmp_path / "c", lr=numpy.float32(0.2), mine=[numpy.int64(4)])
    assert first["lr"] == numpy.float32(0.1) and isinstance(first["lr"], numpy.float32)
    assert first["mine"] == [3] and isinstance(first["mine"][0], numpy.int64)
    with pytest.raises(
        LoadError, match=r"objects in groups: was \['lr: numpy\.float32'\], is None"
    ):
        resumed(tmp_path / "c", lr=0.2)


TOLD: dict[str, tuple[Any, Any]] = {
    "dtype": (torch.bfloat16, torch.float32),  # AnyPrecisionAdamW has such
    "device": (torch.device("cpu"), torch.device("meta")),
    "enum": (Mode.FAST, Mode.SLOW),
    "array": (numpy.arange(3.0), numpy.zeros(3)),
}


@pytest.mark.parametrize("name", TOLD)
def test_an_object_is_compared_by_what_can_be_told_of_it(name: str, tmp_path: Path) -> None:
    """A dtype could not be saved; of another array, `exact` said nothing."""
    saved, other = TOLD[name]
    ckptmap.save(tmp_path / "c", *run(0, mine=saved)).wait()
    first, _, report = resumed(tmp_path / "c", mine=saved)
    assert first["mine"] is saved and not report.inexact
    for keys in ({}, {"mine": other}):
        with pytest.raises(LoadError, match="objects in groups: was"):
            resumed(tmp_path / "c", **keys)


def test_groups_that_become_one_are_told_of_every_key(tmp_path: Path) -> None:
    """Only the first group's keys were looked at."""
    model, optimizer = run(0)
    optimizer.param_groups[1]["mine"] = 0.5
    ckptmap.save(tmp_path / "c", model, optimizer).wait()
    again, _ = run(1)
    one = torch.optim.AdamW(again.parameters(), lr=1e-3)
    report = ckptmap.load(tmp_path / "c", again, one)
    assert "group 0 mine: its parameters had none, 0.5; it is not there" in report.inexact


# ------------------------------------------------------------------------------- tensors that a run makes


def adafactor(seed: int, steps: int) -> tuple[nn.Module, Any, Any]:
    """With a schedule that makes `lr` a tensor in its first step."""
    from transformers.optimization import Adafactor, AdafactorSchedule

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = Adafactor(model.parameters(), scale_parameter=True, warmup_init=True)
    schedule = AdafactorSchedule(optimizer)
    go_on(model, optimizer, schedule, 0, steps)
    return model, optimizer, schedule


def go_on(model: nn.Module, optimizer: Any, schedule: Any, first: int, last: int) -> None:
    for step in range(first, last):
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(4, 0), (0, 4), (4, 2)])
def test_a_rate_that_a_schedule_makes_a_tensor(
    saved_at: int, loaded_at: int, tmp_path: Path
) -> None:
    """Saved as a tensor and loaded where it is a number, and the reverse: it comes back as it was."""
    model, optimizer, schedule = adafactor(0, saved_at)
    ckptmap.save(tmp_path / "c", model, optimizer, scheduler=schedule).wait()
    rate = optimizer.param_groups[0]["lr"]
    rate = rate.clone() if saved_at else rate
    other, theirs, rates = adafactor(1, loaded_at)
    report = ckptmap.load(tmp_path / "c", other, theirs, scheduler=rates, exact=True)
    assert report.inexact == () and alike(rate, theirs.param_groups[0]["lr"])
    go_on(model, optimizer, schedule, saved_at, 8)
    go_on(other, theirs, rates, saved_at, 8)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert alike(optimizer.param_groups[0]["lr"], theirs.param_groups[0]["lr"])


class OwnRate(torch.optim.Optimizer):
    """A class of no library; torch's own would refuse some tensors where it takes many parameters at once."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = self.state[param].get("sum", 0) + param.grad
                param -= group["lr"] * self.state[param]["sum"]


def own(kind: Any, lr: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=lr)
    step_at_random(model, optimizer, 1)
    return model, optimizer


def test_a_tensor_that_an_optimizer_was_built_with_is_compared(tmp_path: Path) -> None:
    """A compiled step reads it; torch's own classes compute otherwise with a number."""
    ckptmap.save(tmp_path / "number", *own(OwnRate, 0.1)).wait()
    with pytest.raises(LoadError, match="group 0 lr: was no tensor, is a float32 tensor"):
        ckptmap.load(tmp_path / "number", *own(OwnRate, torch.tensor(0.5)), exact=True)
    ckptmap.save(tmp_path / "tensor", *own(torch.optim.RMSprop, torch.tensor(0.1))).wait()
    with pytest.raises(LoadError, match="group 0 lr: was a float32 tensor, is no tensor"):
        ckptmap.load(tmp_path / "tensor", *own(torch.optim.RMSprop, 0.1), exact=True)
    ckptmap.save(tmp_path / "wide", *own(OwnRate, torch.tensor(0.1, dtype=torch.float64))).wait()
    with pytest.raises(LoadError, match="group 0 lr: was a float64 tensor, is a float32 tensor"):
        ckptmap.load(tmp_path / "wide", *own(OwnRate, torch.tensor(0.1)), exact=True)
