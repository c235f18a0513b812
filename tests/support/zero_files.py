"""Files of DeepSpeed's ZeRO of any tensors, in the form that `golden/deepspeed` has from DeepSpeed itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write_zero(
    folder: Path, tensors: dict[str, Tensor], world: int, state: dict[str, Any] | None = None
) -> Path:
    """Write a step of stage 2: those in fp32 are trained, the others are buffers. `state` is that of the flat
    vector on every rank; a function in it gets the vector."""
    folder.mkdir(parents=True)
    trained = {n: t for n, t in tensors.items() if t.dtype == torch.float32 and t.numel()}
    flat = torch.cat([value.reshape(-1) for value in trained.values()])
    share = -(-flat.numel() // (2 * world)) * 2
    model = {
        "module": {n: t.half() if n in trained else t for n, t in tensors.items()},
        "buffer_names": [name for name in tensors if name not in trained],
        "param_shapes": [{name: value.shape for name, value in trained.items()}],
        "shared_params": {},
        "dp_world_size": world,
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(world):
        vector = flat[rank * share : (rank + 1) * share].clone()
        own = {k: v(vector) if callable(v) else v for k, v in (state or {}).items()}
        groups = [{"lr": 0.1, "params": [0], "step": 7}]
        held = {
            "single_partition_of_fp32_groups": [vector],
            "base_optimizer_state": {"state": {0: own} if own else {}, "param_groups": groups},
            "partition_count": [world],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": held}, folder / name)
    return folder
