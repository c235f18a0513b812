"""Under torchrun: load rank files into a live FSDP2 model with torch alone, and train on.

`python -m tests.ranks.rank_files KIND DIR TRUTH ...`, jobs one after the other. KIND is how the live
model is sharded: `plain` (fully_shard on all ranks), `hsdp`, `tp`, `fsdp-tp`.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.corpus.models import Recipe, Tiny, optimizer_for, tiny, train
from tests.corpus.writers_fsdp2 import rank_file, sharded
from tests.corpus.writers_mesh import fsdp_tp, tensor_parallel

OTHER = Recipe(seed=7)
"""Values that no file holds."""


def live(kind: str) -> Tiny:
    world = dist.get_world_size()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        return sharded(tiny(OTHER), mesh)
    if kind == "tp":
        return tensor_parallel(
            tiny(OTHER), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        )
    if kind == "fsdp-tp":
        return fsdp_tp(tiny(OTHER), world // 2, 2)
    return sharded(tiny(OTHER))


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(kind: str, folder: Path, truth: dict[str, Any]) -> None:
    loaded = torch.load(rank_file(folder), weights_only=True, mmap=True)
    weights = loaded.get("model", loaded)
    model = live(kind)
    mine = model.state_dict()
    assert set(weights) == set(mine)
    for name, value in mine.items():
        theirs = weights[name]
        assert type(theirs) is type(value), (name, type(theirs), type(value))
        if isinstance(value, DTensor):
            assert theirs.placements == value.placements, (name, theirs.placements)
            assert theirs.device_mesh == value.device_mesh, name
            assert theirs.to_local().shape == value.to_local().shape, name
            assert theirs._spec == value._spec, name
    model.load_state_dict(weights)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), truth["model"][name]), name
    if "optimizer" in loaded:
        optimizer = optimizer_for(model)
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        for name, parameter in model.named_parameters():
            for key, expected in truth["optimizer"][name].items():
                assert torch.equal(full(optimizer.state[parameter][key]), expected), (name, key)
        if "tp" not in kind:  # the attention of `Tiny` counts all heads
            train(model, optimizer, steps=1)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    arguments = sys.argv[1:]
    for kind, folder, truth in zip(*(arguments[i::3] for i in range(3)), strict=True):
        check(kind, Path(folder), torch.load(truth, weights_only=True))
        print(f"{kind} {Path(folder).name} ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
