"""Rounding by position over meshes that cut rows, columns, both, or replicate: `exact` goes on from each on another mesh.

python -m tests.ranks.rounding_cuts save|load FOLDER CUT...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptmap
from ckptmap.live import rounding
from tests.support.resume_optimizers import torchao

SHAPE = (64, 128)
BUILT = {name: torchao(name, bf16_stochastic_round=True) for name in ("_AdamW", "AdamW8bit")}
CUTS: dict[str, list[Any]] = {
    "whole": [], "rows": [Shard(0)], "columns": [Shard(1)], "replicas of rows": [Replicate(), Shard(0)],
    "rows and columns": [Shard(0), Shard(1)], "rows of rows": [Shard(0), Shard(0)],
}  # fmt: skip


def cut(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not CUTS[name]:
        return tensor
    world = dist.get_world_size()
    sizes = (world,) if len(CUTS[name]) == 1 else (2, world // 2)
    return distribute_tensor(tensor, init_device_mesh("cpu", sizes), CUTS[name])


def made(seed: int, name: str, kind: str) -> tuple[nn.Linear, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.bfloat16)
    model.weight = nn.Parameter(cut(model.weight.detach(), name))
    optimizer = BUILT[kind](model.parameters())
    rounding.install(optimizer, seed=3, model=model, same_gradients=True)
    return model, optimizer


def train(model: nn.Linear, optimizer: Any, name: str, first: int, last: int) -> torch.Tensor:
    for number in range(first, last):
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)).bfloat16()
        model.weight.grad = cut(gradient, name)
        optimizer.step()
    weight = model.weight
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


def save(folder: Path, name: str, kind: str) -> None:
    model, optimizer = made(0, name, kind)
    train(model, optimizer, name, 0, 3)
    ckptmap.save(folder / f"{kind} {name}", model, optimizer, step=3).wait()
    truth = train(model, optimizer, name, 3, 6)
    if dist.get_rank() == 0:
        torch.save(truth, folder / f"{kind} {name}.pt")


def load(folder: Path, name: str, kind: str) -> None:
    for before in CUTS:
        if not (folder / f"{kind} {before}").exists():
            continue
        model, optimizer = made(1, name, kind)
        report = ckptmap.load(folder / f"{kind} {before}", model, optimizer, exact=True)
        assert not report.inexact, (kind, before, name, report.inexact)
        found = train(model, optimizer, name, 3, 6)
        assert torch.equal(found, torch.load(folder / f"{kind} {before}.pt")), (kind, before, name)


def main(what: str, folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    for name in names:
        for kind in BUILT:
            (save if what == "save" else load)(folder, name, kind)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
