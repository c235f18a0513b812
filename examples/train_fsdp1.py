"""Train with FSDP1 and compiled layers for three steps, and save as such runs do.

    torchrun --nproc-per-node 4 examples/train_fsdp1.py demo/step-3

The checkpoint is what torch writes: a DCP directory of 4 ranks, with `_orig_mod.` in its keys and the
optimizer beside the model. `demo/reference.pt` holds the same weights, gathered by torch, for a comparison
that is independent of ckptmap.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tiny_llama import build, ranks, tokens
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

FSDP = FullyShardedDataParallel
CPU = torch.device("cpu")


def wrapped() -> torch.nn.Module:
    """Return the model with every layer compiled and sharded, then the whole model sharded."""
    model = build()
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = FSDP(torch.compile(layer), device_id=CPU, use_orig_params=True)
    return FSDP(model, device_id=CPU, use_orig_params=True)


def train(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The names are what matters here; compiling for three steps would take longer than they do.
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            loss = model(input_ids=tokens(), labels=tokens()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state: dict[str, Any] = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "step": 3,
        }
        dcp.save(state, checkpoint_id=path)


def save_reference(model: torch.nn.Module, path: Path, rank: int) -> None:
    whole = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        state = model.state_dict()
    if rank == 0:
        torch.save({name.replace("_orig_mod.", ""): w for name, w in state.items()}, path)


def main() -> None:
    warnings.simplefilter("ignore")  # torch's own notes on FSDP1's age
    path = Path(sys.argv[1])
    with ranks() as rank:
        model = wrapped()
        optimizer = train(model)
        save(model, optimizer, path)
        save_reference(model, path.parent / "reference.pt", rank)


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo may abort a process that ends while its models still refer to a group
