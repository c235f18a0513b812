"""torch's ZeroRedundancyOptimizer, whose ranks keep the state of some parameters each: a run goes on bit for
bit, and another number of ranks, or one process with the plain optimizer, gets all of the state.

python -m tests.ranks.resume_partitioned FOLDER           on all ranks of this start
python -m tests.ranks.resume_partitioned FOLDER from      what other ranks saved; from alone: in one process
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import ckptmap
from tests.support import resume_model
from tests.support.resume_model import ddp, net, plain


def built(seed: int) -> tuple[nn.Module, Any, Any]:
    if not dist.is_initialized():
        model = plain(net(seed))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        model = ddp(net(seed))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(model: nn.Module, optimizer: Any, scheduler: Any, first: int, last: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, last):
        resume_model.train(model, optimizer, step, step + 1, rank)
        scheduler.step()


def values(model: nn.Module, optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Return copies of the weights, and of the state that this rank keeps."""
    state = getattr(optimizer, "optim", optimizer).state
    found = {}
    for name, param in model.named_parameters():
        found[name, ""] = param.detach().clone()
        for entry, value in state.get(param, {}).items():
            found[name, entry] = value.detach().clone()
    return found


def same(one: dict[Any, torch.Tensor], two: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def goes_on(folder: Path) -> None:
    live = built(0)
    train(*live, 0, 2)
    ckptmap.save(folder / "out", *live, step=2).wait()
    before = values(*live[:2])
    assert len([key for key in before if key[1]]) < 3 * len([key for key in before if not key[1]])
    train(*live, 2, 4)
    again = built(1)
    train(*again, 0, 1)  # a DDP that has run has other buckets
    report = ckptmap.load(folder / "out", *again, exact=True)
    assert not report.changes and same(values(*again[:2]), before)
    train(*again, 2, 4)
    assert same(values(*again[:2]), values(*live[:2]))
    assert again[1].param_groups[0]["lr"] == live[1].param_groups[0]["lr"]


def goes_elsewhere(folder: Path) -> None:
    """Every rank has the saved state of the parameters that it steps now, and none is nobody's."""
    model, optimizer, scheduler = built(1)
    report = ckptmap.load(folder / "out", model, optimizer, scheduler)
    assert not report.changes, report.changes
    assert any("world size" in reason for reason in report.inexact)
    mine = getattr(optimizer, "optim", optimizer)
    own = [id(param) for group in mine.param_groups for param in group["params"]]
    with ckptmap.open(folder / "out") as ckpt:
        assert len(ckpt.optimizer_groups[0]["params"]) == len(ckpt.optimizer)
        for name, param in model.named_parameters():
            stored = ckpt.optimizer[name.removeprefix("module.")]
            state = mine.state.get(param, {})
            assert (id(param) in own) == bool(state), name
            assert all(torch.equal(value, stored[entry].read()) for entry, value in state.items())
    train(model, optimizer, scheduler, 2, 3)


def main(folder: Path, *how: str) -> None:
    torch.set_num_threads(1)
    if "alone" not in how:
        dist.init_process_group("gloo")
    if "from" in how:
        goes_elsewhere(folder)
    else:
        goes_on(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
