"""NF4 weights under DDP, which without help would quantize them a second time.

    torchrun --nproc-per-node 2 examples/nf4_under_ddp.py runs/nf4

The frozen base is NF4 and the norms are trained. `prepare_ddp` makes DDP leave the NF4 weights alone, and
makes them equal on all ranks. Weights that were loaded from a checkpoint are equal already.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from small_net import build, ranks, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization import to_nf4

import ckptmap
from ckptmap.integrations.ddp import compare_nf4, prepare_ddp


def base(seed: int) -> nn.Module:
    model = build(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = to_nf4(module.weight.detach(), 64, 256)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def main(folder: Path) -> None:
    with ranks() as rank:
        model = base(seed=rank)  # a different one on each rank, by mistake
        names = prepare_ddp(model)  # now that of rank 0 everywhere
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        train(wrapped, optimizer, 0, 3)
        ckptmap.save(folder, wrapped, optimizer, step=3).wait()

        again = base(seed=7)
        prepare_ddp(again)
        resumed = DistributedDataParallel(again)
        theirs = torch.optim.AdamW((p for p in again.parameters() if p.requires_grad), lr=1e-2)
        ckptmap.load(folder, resumed, theirs, exact=True)
        assert compare_nf4(again) == compare_nf4(model)
        assert train(resumed, theirs, 3, 5) == train(wrapped, optimizer, 3, 5)
        if rank == 0:
            print(f"{len(names)} NF4 weights: the same codes and scales on all ranks")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
