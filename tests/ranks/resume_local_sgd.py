"""torch's PostLocalSGDOptimizer, whose averager counts steps that no parameter's state has: `exact` refuses a
checkpoint without the count, and with it the run goes on bit for bit.

python -m tests.ranks.resume_local_sgd FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import ckptmap
from ckptmap.errors import LoadError
from tests.support.resume_model import ddp, net, train

INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


def built(seed: int, name: str) -> tuple[nn.Module, Any]:
    model = ddp(net(seed))
    averager = PeriodicModelAverager(period=3, warmup_steps=1)
    return model, PostLocalSGDOptimizer(optim=INNER[name](model), averager=averager)


def goes_on(folder: Path, name: str) -> None:
    rank = dist.get_rank()
    model, optimizer = built(0, name)
    train(model, optimizer, 0, 4, rank)
    notes = ckptmap.save(folder / "without", model, optimizer).wait()
    assert rank or any("PostLocalSGDOptimizer keeps step of its own" in note for note in notes)
    again, theirs = built(1, name)
    try:
        ckptmap.load(folder / "without", again, theirs, exact=True)
        raise AssertionError("exact took it without the count of its averager")
    except LoadError as error:
        assert error.code == "CKM507" and "keeps step of its own" in str(error), error
    ckptmap.save(folder / "with", model, optimizer, stateful={"sgd": optimizer}).wait()
    report = ckptmap.load(folder / "with", again, theirs, stateful={"sgd": theirs}, exact=True)
    assert not report.changes and theirs.averager.step == optimizer.averager.step == 4
    train(model, optimizer, 4, 9, rank)
    train(again, theirs, 4, 9, rank)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for inner in INNER:
        goes_on(Path(sys.argv[1]) / inner, inner)
        dist.barrier()
    dist.destroy_process_group()
