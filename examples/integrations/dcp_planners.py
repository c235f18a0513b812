"""torch's own dcp.save and dcp.load with 8-bit moments and an NF4 base, loaded into another sharding.

    PYTHONPATH=examples torchrun --nproc-per-node 2 examples/integrations/dcp_planners.py runs/dcp

It saves from FSDP2 over both ranks and loads into an unsharded model on each. Without the planners DCP
stores one pickle per rank, which no other world size can read.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from small_net import build, mesh, ranks, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from ckptmap.integrations.dcp import load_planner, save_planner


def quantized(seed: int) -> Any:
    """The first layer's weights are frozen and in NF4."""
    model = build(seed)
    for linear in (model.layers[0].up, model.layers[0].down):
        weight = to_nf4(linear.weight.detach())
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return model


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    with ranks() as rank:
        model = fully_shard(quantized(seed=0), mesh=mesh())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        train(model, optimizer, 0, 3)
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder, planner=save_planner())

        alone = quantized(seed=1)
        state = {"model": alone.state_dict()}
        dcp.load(state, checkpoint_id=folder, planner=load_planner())
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        difference = (alone(x) - model(x)).abs().max().item()
        assert difference == 0.0, difference
        if rank == 0:
            print(f"NF4 over 2 ranks, loaded whole on 1: outputs differ by {difference}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
