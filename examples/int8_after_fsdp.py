"""int8 weights under FSDP: quantize the checkpoint once, then shard it; never quantize after wrapping.

    torchrun --nproc-per-node 2 examples/int8_after_fsdp.py runs/int8

FSDP2 cannot shard torchao's int8 weights, and quantizing a wrapped model would quantize flat parameters
instead of weights. So the FSDP1 checkpoint becomes int8 on disk, and each rank of the next run reads its
own rows of codes and scales.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from small_net import WIDTH, Block, build, mesh, ranks, train
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ckptmap


def trained(folder: Path) -> None:
    """An FSDP1 run, saved."""
    model = FullyShardedDataParallel(
        build(seed=0), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, 3)
    ckptmap.save(folder / "fsdp1", model, optimizer, step=3).wait()


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    with ranks() as rank:
        trained(folder)
        if rank == 0:
            ckptmap.convert(folder / "fsdp1", folder / "int8", to="fsdp2-int8", optimizer="drop")
        dist.barrier()
        model = build(seed=1).requires_grad_(False)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh())
        fully_shard(model, mesh=mesh())
        report = ckptmap.load(folder / "int8", model)
        dense = build(seed=2).requires_grad_(False)
        ckptmap.load(folder / "fsdp1", dense)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        error = (model(x) - dense(x)).float().norm() / dense(x).float().norm()
        assert error < 0.02, error
        if rank == 0:
            print(report)
            print(f"int8 rows on {dist.get_world_size()} ranks; outputs differ by {error:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
