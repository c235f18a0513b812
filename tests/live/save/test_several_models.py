"""Several models, optimizers and schedulers, and other objects with a state, in one checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptmap
from ckptmap.errors import ArgumentError, LoadError
from tests.corpus.ranks import run_ranks


class Run:
    """A policy in a wrapper, a value head without one, an average of the policy, and two optimizers."""

    def __init__(self) -> None:
        policy = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        value = nn.Linear(4, 1)
        self.models: dict[str, nn.Module] = {
            "policy": nn.DataParallel(policy), "value": value, "ema": AveragedModel(policy),
        }  # fmt: skip
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "policy": torch.optim.AdamW(policy.parameters(), lr=0.1),
            "value": torch.optim.SGD(value.parameters(), lr=0.2, momentum=0.9),
        }
        self.schedulers = {
            name: torch.optim.lr_scheduler.StepLR(one, 2) for name, one in self.optimizers.items()
        }
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def train(self, steps: int) -> None:
        policy, value, ema = self.models.values()
        for _ in range(steps):
            x = torch.randn(3, 4)
            loss: Any = policy.module(x).square().sum() + value(x).square().sum()
            self.scaler.scale(loss).backward()
            for one in self.optimizers.values():
                self.scaler.step(one)
                one.zero_grad()
            self.scaler.update()
            assert isinstance(ema, AveragedModel)
            ema.update_parameters(policy.module)
            for scheduler in self.schedulers.values():
                scheduler.step()

    def save(self, path: Path) -> None:
        ckptmap.save(
            path, self.models, self.optimizers, self.schedulers, stateful={"scaler": self.scaler}
        ).wait()

    def load(self, path: Path) -> Any:
        return ckptmap.load(
            path, self.models, self.optimizers, self.schedulers,
            stateful={"scaler": self.scaler}, exact=True,
        )  # fmt: skip

    def same(self, other: Run) -> bool:
        pairs = (
            (a, b)
            for name in self.models
            for a, b in zip(
                self.models[name].state_dict().values(),
                other.models[name].state_dict().values(),
                strict=True,
            )
        )
        return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A checkpoint after two steps, and the run two steps later."""
    path = tmp_path_factory.mktemp("several") / "step-2"
    torch.manual_seed(0)
    run = Run()
    run.train(2)
    run.save(path)
    run.train(2)
    return path, run


def test_the_run_goes_on_bit_for_bit(saved: tuple[Path, Run]) -> None:
    path, run = saved
    again = Run()
    report = again.load(path)
    assert report.inexact == () and len(report.loaded) == 17
    again.train(2)
    assert again.same(run)
    assert again.scaler.state_dict() == run.scaler.state_dict()


def test_one_of_them_alone(saved: tuple[Path, Run], tmp_path: Path) -> None:
    """As `convert` writes it with one argument, and as a model takes it."""
    path, _ = saved
    with ckptmap.open(path) as whole, ckptmap.open(path, root="policy") as alone:
        assert "it holds 3 models" in whole.notes[-1] and "not read: value, ema" in alone.notes[-1]
        inside = [fqn for fqn in whole if fqn.startswith("policy.")]
        assert list(alone) == [fqn.removeprefix("policy.") for fqn in inside]
        assert alone.optimizer.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert [group["params"] for group in alone.optimizer_groups] == [[*alone.optimizer]]
        ckptmap.convert(path, tmp_path / "hf", to="hf", source_root="policy")
        with ckptmap.open(tmp_path / "hf") as written:
            assert sorted(written) == sorted(alone)
            for fqn in inside:
                assert torch.equal(written[fqn.removeprefix("policy.")].read(), whole[fqn].read())
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        report = ckptmap.load(alone, model, torch.optim.AdamW(model.parameters()))
    assert report.missing == report.unexpected == () and report.state is not None
    assert len(report.state.loaded) == 8


def test_a_model_is_left_out_only_by_name(saved: tuple[Path, Run]) -> None:
    path, _ = saved
    run = Run()
    models, optimizers = {"policy": run.models["policy"]}, run.optimizers["policy"]
    with pytest.raises(LoadError, match=r"10 unexpected: value\.weight") as error:
        ckptmap.load(path, models, optimizers)
    assert "drop=['value.*', 'ema.*']" in error.value.hint
    report = ckptmap.load(path, models, optimizers, drop=["value.*", "ema.*"])
    assert len(report.loaded) == 7 and report.state is not None and len(report.state.loaded) == 8
    assert "optimizers: was ['policy', 'value'], is one" in report.inexact
    assert "nobody takes the state of 'scaler'" in report.inexact


def test_one_optimizer_for_several_and_several_for_one(tmp_path: Path) -> None:
    """A tied weight has the names of both models, and its state is saved once."""

    def built() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        b.weight = a.weight
        return {"a": a, "b": b}, {
            "weights": torch.optim.SGD([a.weight], lr=0.1, momentum=0.9),
            "biases": torch.optim.Adam([a.bias, b.bias], lr=0.1),
        }

    def train(models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> None:
        sum(one(torch.ones(4)).square().sum() for one in models.values()).backward()  # type: ignore[union-attr]
        for one in optimizers.values():
            one.step()
            one.zero_grad()

    models, optimizers = built()
    train(models, optimizers)
    ckptmap.save(tmp_path / "c", models, optimizers).wait()
    others, theirs = built()
    assert ckptmap.load(tmp_path / "c", others, theirs, exact=True).inexact == ()
    train(models, optimizers)
    train(others, theirs)
    assert torch.equal(models["b"].weight, others["b"].weight)  # type: ignore[arg-type]
    both = torch.optim.SGD([*models["a"].parameters(), models["b"].bias])  # type: ignore[list-item]
    with pytest.raises(LoadError, match=r"a.weight.*two optimizers"):
        ckptmap.save(tmp_path / "d", models, {"sgd": both, "adam": optimizers["weights"]})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({}, "an empty dict"),
        ({"a.b": nn.Linear(1, 1)}, "the name 'a.b'"),
        ({"module": nn.Linear(1, 1)}, "the name 'module'"),
        ({"a": 3}, r"model\['a'\]=3, expected a torch.nn.Module"),
    ],
)
def test_names_and_models_that_are_refused(model: Any, text: str, tmp_path: Path) -> None:
    for call in (ckptmap.save, ckptmap.load):
        with pytest.raises(ArgumentError, match=text):
            call(tmp_path / "c", model)


class Counter:
    """An object with a state of its own: torch's Stateful."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state["state"], type(self.state)):
            raise TypeError("another kind")
        self.state = state["state"]


def test_objects_with_a_state(tmp_path: Path) -> None:
    """Tuples and tensors come back as they were; what lacks a state, or cannot take it, is named."""
    model, path = nn.Linear(2, 2), tmp_path / "c"
    state = {"at": (1, (2, None)), "generator": torch.Generator().get_state(), "empty": {}}
    ckptmap.save(path, model, stateful={"loader": Counter(copy.deepcopy(state))}).wait()
    loader = Counter({})
    ckptmap.load(path, model, stateful={"loader": loader}, exact=True)
    assert isinstance(loader.state, dict)
    assert loader.state["at"] == (1, (2, None)) and loader.state["empty"] == {}
    assert torch.equal(loader.state["generator"], state["generator"])  # type: ignore[arg-type]

    with pytest.raises(LoadError, match="has no state of 'sampler', expected one of 'loader'"):
        ckptmap.load(path, model, stateful={"sampler": Counter({})})
    report = ckptmap.load(path, model, stateful={"sampler": Counter({})}, strict=False)
    assert {"no state of 'sampler'", "nobody takes the state of 'loader'"} <= {*report.inexact}
    with pytest.raises(LoadError, match="Counter cannot take its saved state: TypeError"):
        ckptmap.load(path, model, stateful={"loader": Counter([])})
    with pytest.raises(ArgumentError, match="an object with state_dict"):
        ckptmap.save(tmp_path / "d", model, stateful={"loader": 3})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="stateful: is a Counter, expected objects by name"):
        ckptmap.save(tmp_path / "d", model, stateful=Counter(1))  # type: ignore[arg-type]


def test_an_optimizer_as_an_object_with_a_state(tmp_path: Path) -> None:
    """Its state dict goes by integers: torch takes state under other keys, and steps as if it had none."""
    saved, again = ((m := nn.Linear(3, 3), torch.optim.AdamW(m.parameters())) for _ in range(2))
    saved[0](torch.ones(3)).sum().backward()
    saved[1].step()
    nested = {"last": [{7: torch.ones(1), "name": {}}]}
    ckptmap.save(
        tmp_path / "c", saved[0], stateful={"opt": saved[1]}, extra={"opt": saved[1].state_dict()},
        extra_per_rank=nested, gradients=False,
    ).wait()  # fmt: skip
    report = ckptmap.load(tmp_path / "c", again[0], stateful={"opt": again[1]})
    assert torch.equal(again[1].state[again[0].weight]["exp_avg"], torch.full((3, 3), 0.1))
    extra: Any = report.extra["opt"]
    assert [*extra["state"]] == [0, 1] and extra["state"][0].keys() == saved[1].state_dict()[
        "state"
    ][0].keys()
    assert report.extra_per_rank == nested


def test_schedulers_of_others(saved: tuple[Path, Run]) -> None:
    """One for two, two for one, and one of another class, whose state torch would take without a look."""
    path, _ = saved
    run = Run()
    before = [p.clone() for model in run.models.values() for p in model.parameters()]
    one = run.schedulers["policy"]
    for wrong in (one, {"policy": one}):
        with pytest.raises(LoadError, match="the saved state has policy, value, expected") as error:
            ckptmap.load(path, run.models, run.optimizers, wrong)
        assert error.value.code == "CKM508"
    after = [p for model in run.models.values() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    other = torch.optim.lr_scheduler.ExponentialLR(run.optimizers["value"], 0.9)
    report = ckptmap.load(path, run.models, run.optimizers, {**run.schedulers, "value": other})
    assert "scheduler 'value': not in both states: step_size" in report.inexact


def test_ranks(tmp_path: Path) -> None:
    """FSDP2, FSDP1 and DDP in one checkpoint, at the same and at another world size:
    tests/ranks/several_models.py."""
    for world in (2, 3):
        run_ranks("tests.ranks.several_models", world, [str(tmp_path / "c")], timeout=240)
