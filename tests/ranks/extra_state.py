"""Extra state of modules on several ranks: that of the stages of a pipeline, and that in which replicas differ.

python -m tests.ranks.extra_state FOLDER stages|replicas      2 or 4 ranks
python -m tests.ranks.extra_state FOLDER alone WORLD          1 process: from what WORLD ranks saved
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptmap
from ckptmap.errors import LoadError
from tests.ranks import pipeline_stages
from tests.ranks.pipeline_stages import LAYERS, Part, Run
from tests.ranks.resume_known_plan import Counted


class Scaled(nn.Linear):
    """A layer whose output depends on what is in no state but the extra one: a count, a tensor, and a number that
    only some modules have."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(8, 8)
        self.number, self.calls, self.peak = number, 0, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) / (1 + self.peak[0]) * (1 + 0.1 * self.calls)
        largest = x.detach().abs().amax()
        out.register_hook(lambda _: self.count(largest))  # a stage finds shapes by a forward alone
        return out

    def count(self, largest: torch.Tensor) -> None:
        self.calls += 1
        self.peak = torch.maximum(self.peak, largest)

    def get_extra_state(self) -> Any:
        own = {"odd": [self.calls, (self.peak * 2, None)]} if self.number % 2 else {}
        return {"calls": self.calls, "deep": {"peak": self.peak, 3: "x"}, **own}

    def set_extra_state(self, state: Any) -> None:
        assert state["deep"][3] == "x"
        assert ("odd" in state) == bool(self.number % 2)
        self.calls, self.peak = state["calls"], state["deep"]["peak"].clone()


class ScaledPart(Part):
    def __init__(self, numbers: Any) -> None:
        super().__init__(numbers)
        for number in numbers:
            torch.manual_seed(10 + number)
            self.layers[str(number)].append(Scaled(number))


def stages(folder: Path) -> None:
    """Each module gets its own state back, on the stages that saved it and on others."""
    world = dist.get_world_size()
    pipeline_stages.Part = ScaledPart  # type: ignore[misc]
    pipeline_stages.goes_on(folder / f"stages{world}")
    if world == LAYERS:
        return
    pipeline_stages.goes_on(folder / "interleaved", interleaved=True)
    run = Run(interleaved=True)
    report = ckptmap.load(folder / f"stages{world}", *run.saved, strict=False)
    assert not report.missing, report
    of_all = known(folder / f"stages{world}")
    for part in run.parts:
        for number, layer in part.layers.items():
            assert layer[-1].calls == of_all[number]["calls"], number


def known(path: Path) -> dict[str, Any]:
    """Return the extra state of every layer in a checkpoint."""
    whole = ScaledPart(range(LAYERS))
    ckptmap.load(path, whole)
    return {number: layer[-1].get_extra_state() for number, layer in whole.layers.items()}


def replicas(folder: Path) -> None:
    """A state that differs between replicas comes back on each; one that is the same is saved once."""
    rank = dist.get_rank()
    path = folder / f"replicas{dist.get_world_size()}"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(Scaled(0), Scaled(1)))
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(2):
        model(
            torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        ).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckptmap.save(path, model, optimizer, overwrite=True).wait()
    with Counted() as counted:
        ckptmap.save(path, model, optimizer, overwrite=True).wait()
    assert counted.plans == 0, "it is known from the save before"
    again = DistributedDataParallel(nn.Sequential(Scaled(0), Scaled(1)))
    theirs = torch.optim.AdamW(again.parameters())
    report = ckptmap.load(path, again, theirs, exact=True)
    assert not report.extra and not report.unexpected, report
    for one, other in zip(model.module, again.module, strict=True):
        assert one.calls == other.calls == 2 and torch.equal(one.peak, other.peak)
    with ckptmap.open(path) as checkpoint:
        names = {path[:3] for path in (*checkpoint.plain, *checkpoint.other)}
    others = {f"rank{n}" for n in range(1, dist.get_world_size())}
    assert {name[1] for name in names if name[0] == "module_extra_state_of_ranks"} == others


def alone(folder: Path, world: str) -> None:
    of_all = known(folder / f"stages{world}")
    assert {one["calls"] for one in of_all.values()} == {of_all["0"]["calls"]} != {0}
    assert len({float(one["deep"]["peak"][0]) for one in of_all.values()}) == LAYERS
    ckptmap.convert(folder / f"stages{world}", folder / f"full{world}.pt", to="full")
    assert known(folder / f"full{world}.pt").keys() == of_all.keys()
    model = nn.Sequential(Scaled(0), Scaled(1))
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / f"replicas{world}"
    with pytest.raises(LoadError, match=r"own 0\._extra_state, that of the lowest"):
        ckptmap.load(path, model, optimizer, exact=True)
    report = ckptmap.load(path, model, optimizer)
    assert not report.extra and model[0].calls == 2


def main(folder: Path, story: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if story == "alone":
        alone(folder, *arguments)
        return
    dist.init_process_group("gloo")
    {"stages": stages, "replicas": replicas}[story](folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
