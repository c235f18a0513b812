"""Loads of two ranks into parameters that others hold, too.

python -m tests.ranks.load_replaced FOLDER
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ckptmap.errors import LoadError
from ckptmap.live.load.load import load
from ckptmap.live.save.save import save
from tests.support.cpu_sharding import fully_shard


def linear(device: str = "cpu") -> nn.Linear:
    torch.manual_seed(dist.get_rank() if device == "meta" else 0)
    return nn.Linear(6, 4, device=device)


def refused(call: Callable[[], Any]) -> None:
    try:
        call()
    except LoadError as error:
        assert error.code == "CKM505" and "summon_full_params" in str(error), error
    else:
        raise AssertionError("no LoadError")


def summoned(folder: Path) -> None:
    """What is gathered is written over the shards when it ends."""
    for use_orig_params in (True, False):
        model = FSDP(linear(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        with FSDP.summon_full_params(model):
            want = {name: p.detach().clone() for name, p in model.named_parameters()}
            refused(partial(load, folder / "model.pt", model))
            refused(partial(save, folder / "summoned", model))
        with FSDP.summon_full_params(model, writeback=False):
            for name, param in model.named_parameters():
                assert torch.equal(param, want[name]), name


def held_elsewhere(folder: Path) -> None:
    """An optimizer, hooks and weak references go on with a sharded parameter that was on meta."""
    model: Any = fully_shard(linear("meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen: list[Tensor] = []
    refs = [weakref.ref(param) for param in model.parameters()]
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(seen.append)
        param.mark = "mine"
    load(folder / "model.pt", model)
    assert [ref() for ref in refs] == list(model.parameters())
    before = [param.full_tensor().detach().clone() for param in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert len(seen) == 2
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.mark == "mine"
        assert not torch.equal(param.full_tensor().detach(), old)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in (summoned, held_elsewhere):
        scenario(Path(sys.argv[1]))
        dist.barrier()
    dist.destroy_process_group()
