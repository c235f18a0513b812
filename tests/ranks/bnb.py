"""Two layers of bitsandbytes under FSDP2, saved by torch.distributed.checkpoint as they come."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from tests.support.bnb_cases import Layers, linear4bit, weight
from tests.support.cpu_sharding import fully_shard


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for storage in (torch.uint8, torch.bfloat16):
        name = str(storage).removeprefix("torch.")
        model = Layers({
            "up": linear4bit(weight((64, 128), torch.bfloat16, 1), "nf4", True, 64, storage),
            "down": linear4bit(weight((128, 64), torch.bfloat16, 2), "nf4", True, 64, storage),
        })  # fmt: skip
        del model.norm.bias
        model.norm.register_parameter("bias", None)
        if dist.get_rank() == 0:
            save_file(model.state_dict(), folder / f"base-{name}.safetensors")
        dist.barrier()
        fully_shard(model, mesh=mesh)
        dcp.save(model.state_dict(), checkpoint_id=folder / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
