"""Stages of a pipeline, each with an optimizer of its own, in one checkpoint: `load` is told how to go on, and goes on bit
for bit where all groups have the settings of rank 0's; `exact` refuses, as groups of other ranks are not saved.

python -m tests.ranks.pipeline_stages FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import ckptmap
from ckptmap.errors import LoadError


class Part(nn.Module):
    """The names of a stage are its own, as those of layers are."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.add_module(f"layer{number}", nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def made(seed: int) -> tuple[Part, torch.optim.AdamW, Any]:
    rank = dist.get_rank()
    torch.manual_seed(seed + rank)
    model = Part(rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), schedule


def train(optimizer: Any, schedule: Any, first: int, last: int) -> None:
    for number in range(first, last):
        rows, target = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(number))
        if dist.get_rank() == 0:
            schedule.step(rows)
        else:
            schedule.step(target=target)
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer, schedule = made(0)
    train(optimizer, schedule, 0, 3)
    ckptmap.save(folder / "c", model, optimizer, step=3).wait()
    train(optimizer, schedule, 3, 6)
    again, theirs, schedule = made(7)
    with pytest.raises(LoadError) as names:
        ckptmap.load(folder / "c", again, theirs)
    assert "strict=False; also where other ranks have them, as stages" in names.value.hint
    with pytest.raises(LoadError, match="training cannot go on bit for bit") as exact:
        ckptmap.load(folder / "c", again, theirs, exact=True, strict=False)
    lost = "group 0: what was set for 2 of its parameters is not in the checkpoint"
    assert (lost in exact.value.message) == (dist.get_rank() == 1)
    report = ckptmap.load(folder / "c", again, theirs, strict=False)
    assert report.state is not None and len(report.state.loaded) == 4
    train(theirs, schedule, 3, 6)
    truth = dict(model.named_parameters())
    assert all(torch.equal(truth[name], param) for name, param in again.named_parameters())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
