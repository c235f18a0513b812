"""What each rank holds by transformers' own styles of tensor parallelism: `rank_N.pt`, {style: {name: local tensor}}.

python -m tests.ranks.transformers_tp_styles FOLDER      one rank of two
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

SHAPES = {"weight": (6, 10), "bias": (6,), "experts": (4, 6, 10)}


def parameters() -> dict[str, nn.Parameter]:
    """Return tensors of distinct numbers."""
    counts = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    return {
        name: nn.Parameter(torch.arange(float(counts[name])).reshape(shape))
        for name, shape in SHAPES.items()
    }


def main(folder: Path, styles: list[str]) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    held = {}
    for style in styles:
        module = nn.Module()
        for name, parameter in parameters().items():
            if style.startswith("embedding") and name == "bias":
                continue  # an embedding has none
            module.register_parameter(name, parameter)
            ALL_PARALLEL_STYLES[style].shard_param(module, name, mesh)
        held[style] = {
            name: (one.to_local() if isinstance(one, DTensor) else one).detach().clone()
            for name, one in module.named_parameters()
        }
    torch.save(held, folder / f"rank_{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
