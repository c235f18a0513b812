"""LBFGS under FSDP2 and DDP goes on bit for bit; under FSDP1 it is refused.

python -m tests.ranks.lbfgs FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import ckptmap
from ckptmap.errors import LoadError
from tests.live.optimizer.test_lbfgs import built, train
from tests.support.cpu_sharding import fully_shard


def wrapped(kind: str, seed: int) -> tuple[Any, torch.optim.LBFGS]:
    model: nn.Module = built(seed)[0]
    if kind == "fsdp2":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


def goes_on(kind: str, path: Path) -> None:
    model, optimizer = wrapped(kind, 0)
    train(model, optimizer, 0, 3)
    ckptmap.save(path, model, optimizer).wait()
    losses = train(model, optimizer, 3, 6)
    again, theirs = wrapped(kind, 1)
    train(again, theirs, 0, 1)  # DDP builds its buckets in its first step
    report = ckptmap.load(path, again, theirs, exact=True)
    assert report.inexact == (), report.inexact
    assert train(again, theirs, 3, 6) == losses


def refused(path: Path) -> None:
    model = FullyShardedDataParallel(built(0)[0], device_id=torch.device("cpu"))
    optimizer = torch.optim.LBFGS(model.parameters())
    try:
        ckptmap.save(path, model, optimizer)
    except LoadError as error:
        assert error.code == "CKM508" and "flat parameter of FSDP1" in error.message, error
    else:
        raise AssertionError("vectors of a part were saved as those of all")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for kind in ("fsdp2", "ddp"):
        goes_on(kind, folder / kind)
    refused(folder / "fsdp1")
    dist.barrier()
    dist.destroy_process_group()
