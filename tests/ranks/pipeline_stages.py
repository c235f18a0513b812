"""Stages of a pipeline, each with an optimizer of its own, in one checkpoint: a run goes on bit for bit on the stages
that saved it, and its weights, state and groups are found by FQN on other stages and in one process.

python -m tests.ranks.pipeline_stages FOLDER same others part  2 ranks: a stage each, two each, a part saved
python -m tests.ranks.pipeline_stages FOLDER four|alone        4 ranks, 1 process: from what 2 stages saved
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import ckptmap
from ckptmap.errors import ArgumentError, LoadError
from tests.ranks.resume_known_plan import Counted

LAYERS, SAVED, LAST = 4, 4, 10
RATES = (1e-2, 3e-3)
Params = Iterable[nn.Parameter]
Optimizers = Callable[[Params, float], torch.optim.Optimizer]


class Part(nn.Module):
    """Some of the layers, by the names that they have in the whole model."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            layer = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1))
            self.layers[str(number)] = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def adamw(params: Params, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=rate)


def tensor_rate(params: Params, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=torch.tensor(rate))


def decayed_apart(params: Params, rate: float) -> torch.optim.Optimizer:
    """Weights and biases apart; norms have a group of their own, which is empty on a stage."""
    listed = [*params]
    of_matrices, rest = ([p for p in listed if (p.ndim > 1) == two] for two in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": of_matrices, "weight_decay": 0.1},
        {"params": rest if dist.get_rank() else [], "weight_decay": 0.0},
        {"params": [] if dist.get_rank() else rest, "weight_decay": 0.0, "lr": rate / 2},
    ]
    return torch.optim.AdamW(groups, lr=rate)


class Run:
    """A stage of this rank, or two where `interleaved`, each with an optimizer and a scheduler."""

    def __init__(
        self, make: Optimizers = adamw, rates: Sequence[float] = (1e-2, 1e-2),
        interleaved: bool = False, one_f_one_b: bool = False,
    ) -> None:  # fmt: skip
        rank, world = dist.get_rank(), dist.get_world_size()
        count = world * (1 + interleaved)
        numbers = [*range(rank, count, world)]
        each = LAYERS // count
        self.parts = [Part(range(n * each, n * each + each)) for n in numbers]
        micro = torch.zeros(2, 8, requires_grad=True)  # without it a stage runs to find its shapes
        stages = [
            PipelineStage(part, number, count, torch.device("cpu"), (micro,), (micro,))
            for part, number in zip(self.parts, numbers, strict=True)
        ]
        kind: Any = Schedule1F1B if one_f_one_b else ScheduleGPipe
        self.schedule = (
            ScheduleInterleaved1F1B([*stages], 2, loss_fn=loss)
            if interleaved
            else kind(stages[0], 2, loss_fn=loss)
        )
        self.optimizers = [make(part.parameters(), rates[rank % 2]) for part in self.parts]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(one, 3) for one in self.optimizers]
        torch.manual_seed(100 + rank)

    @property
    def saved(self) -> tuple[Any, Any, Any]:
        of_run = (self.parts, self.optimizers, self.schedulers)
        return of_run if len(self.parts) > 1 else tuple(one[0] for one in of_run)  # type: ignore[return-value]

    def train(self, first: int, last: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for number in range(first, last):
            rows, target = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(number))
            ends = {"target": target} if rank == world - 1 else {}
            self.schedule.step(*([rows] if rank == 0 else []), **ends)
            for one in (*self.optimizers, *self.schedulers):
                one.step()
            for one in self.optimizers:
                one.zero_grad()

    def spoil(self) -> None:
        """Make all values others than those of the run, as those of a new process are."""
        with torch.no_grad():
            for part in self.parts:
                for param in part.parameters():
                    param.add_(1.0)
        torch.manual_seed(7)

    def values(self) -> dict[str, torch.Tensor]:
        return {k: v.detach() for part in self.parts for k, v in part.named_parameters()}


def goes_on(path: Path, **of_run: Any) -> None:
    """10 steps are 4, a save, a load and 6; and saves after the first one are as right."""
    whole = Run(**of_run)
    whole.train(0, LAST)
    first = Run(**of_run)
    ckptmap.save(path, *first.saved).wait()
    first.train(0, SAVED)
    ckptmap.save(path, *first.saved, step=SAVED, overwrite=True).wait()
    with Counted() as counted:
        assert ckptmap.save(path, *first.saved, step=SAVED, overwrite=True).wait() == ()
    assert counted.plans == 0, "it is known from the save before"
    again = Run(**of_run)
    again.spoil()
    report = ckptmap.load(path, *again.saved, exact=True)
    assert report.inexact == () and not report.unexpected, report
    again.train(SAVED, LAST)
    truth, found = whole.values(), again.values()
    assert truth.keys() == found.keys()
    assert all(torch.equal(truth[name], found[name]) for name in truth), of_run
    assert [g["lr"] for one in whole.optimizers for g in one.param_groups] == [
        g["lr"] for one in again.optimizers for g in one.param_groups
    ]


def groups_in(path: Path) -> list[Any]:
    with ckptmap.open(path) as checkpoint:
        return [*checkpoint.optimizer_groups]


def same(folder: Path) -> None:
    """A stage each: of equal settings one group is stored, of others one for each."""
    goes_on(folder / "one", one_f_one_b=True)
    (group,) = groups_in(folder / "one")
    assert len(group["params"]) == 4 * LAYERS
    goes_on(folder / "two", rates=RATES)
    assert [g["initial_lr"] for g in groups_in(folder / "two")] == [*RATES]
    goes_on(folder / "tensors", make=tensor_rate)
    assert len(groups_in(folder / "tensors")) == 1
    goes_on(folder / "two_tensors", make=tensor_rate, rates=RATES)
    assert len(groups_in(folder / "two_tensors")) == 2
    goes_on(folder / "apart", make=decayed_apart)
    assert len(groups_in(folder / "apart")) == 3


def others(folder: Path) -> None:
    """Two stages each, and an optimizer a part; what differs is refused."""
    goes_on(folder / "interleaved", interleaved=True)
    assert len(groups_in(folder / "interleaved")) == 1
    goes_on(folder / "interleaved_two", interleaved=True, rates=RATES)
    assert len(groups_in(folder / "interleaved_two")) == 2
    with pytest.raises(LoadError) as names:
        ckptmap.load(folder / "interleaved", *Run().saved)
    assert "strict=False; also where other ranks have them, as stages" in names.value.hint
    with pytest.raises(LoadError, match="how tensors are cut"):
        ckptmap.load(folder / "interleaved", *Run().saved, exact=True, strict=False)
    report = ckptmap.load(folder / "interleaved_two", *Run().saved, strict=False)
    assert report.missing == () and report.state is not None and not report.state.initialised


def part(folder: Path) -> None:
    """A save of a part: a rank that leaves out none of its weights, and one that does, have one base."""
    base, path = folder / "base", folder / "part"
    ckptmap.save(base, Run().saved[0]).wait()
    only = ["layers.0.*", "layers.1.*", "layers.3.*"]

    def made() -> Run:
        run = Run()
        for one in run.parts:
            one.layers[str(2 * dist.get_rank())].requires_grad_(False)
        run.optimizers = [
            adamw([p for p in one.parameters() if p.requires_grad], 1e-2) for one in run.parts
        ]
        run.schedulers = [torch.optim.lr_scheduler.StepLR(one, 3) for one in run.optimizers]
        return run

    whole = made()
    whole.train(0, SAVED)
    for _ in range(2):
        ckptmap.save(path, *whole.saved, only=only, base=base, overwrite=True).wait()
    again = made()
    again.spoil()
    ckptmap.load(path, *again.saved, exact=True)
    for run in (whole, again):
        torch.manual_seed(5)
        run.train(SAVED, LAST)
    found = again.values()
    assert all(torch.equal(value, found[name]) for name, value in whole.values().items())
    other = Run()
    other.spoil()
    ckptmap.save(folder / "other_base", other.saved[0]).wait()
    ckptmap.load(folder / ("other_base" if dist.get_rank() else "base"), other.saved[0])
    with pytest.raises(
        ArgumentError, match=r"from .*other_base, those of a lower rank from .*base"
    ):
        ckptmap.save(folder / "two", other.saved[0], only="layers.*.0.bias").wait()


def four(folder: Path) -> None:
    """Each rank finds the settings of its layer."""
    run = Run()
    report = ckptmap.load(folder / "two", *run.saved, strict=False)
    assert report.missing == () and report.state is not None and not report.state.initialised
    rate = RATES[dist.get_rank() // 2]
    ((group,),) = [one.param_groups for one in run.optimizers]
    assert group["initial_lr"] == rate and group["lr"] == pytest.approx(rate / 10)
    (scheduler,) = run.schedulers
    assert scheduler.base_lrs == [rate] and scheduler.last_epoch == SAVED


def alone(folder: Path) -> None:
    """One process, with as many groups as it likes; and torch's own form of the state takes it."""
    model = Part(range(LAYERS))
    one = torch.optim.AdamW(model.parameters(), lr=1.0)
    report = ckptmap.load(folder / "one", model, one)
    assert report.state is not None and not report.state.initialised
    assert [g["initial_lr"] for g in one.param_groups] == [1e-2]
    halves = [model.layers[str(n)].parameters() for n in range(LAYERS)]
    two = torch.optim.AdamW([{"params": [*half]} for half in halves], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(two, 3)
    ckptmap.load(folder / "two", model, two, scheduler)
    rates = [RATES[0], RATES[0], RATES[1], RATES[1]]
    assert [g["initial_lr"] for g in two.param_groups] == rates == scheduler.base_lrs
    report = ckptmap.load(folder / "two", model, one)
    assert any("its parameters had" in text for text in report.inexact), report.inexact
    ckptmap.convert(folder / "one", folder / "full.pt", to="full")
    state = torch.load(folder / "full.pt", weights_only=True)
    assert len(state["optimizer"]["param_groups"]) == 1


def main(folder: Path, *stories: str) -> None:
    torch.set_num_threads(1)
    if stories == ("alone",):
        alone(folder)
        return
    dist.init_process_group("gloo")
    for story in stories:
        {"same": same, "others": others, "part": part, "four": four}[story](folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
