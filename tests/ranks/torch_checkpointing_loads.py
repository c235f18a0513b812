"""Load a save of torch_checkpointing into live models and optimizers, and compare them with what was saved.

python -m tests.ranks.torch_checkpointing_loads FOLDER STEP OPTIMIZER KIND...

FOLDER is one that tests.ranks.torch_checkpointing_saves made; each KIND is `fsdp1` or a name of its MESHES.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

import ckptmap
from tests.ranks.torch_checkpointing_saves import MESHES, OPTIMIZERS, net, on_cpus

WHOLE = StateDictOptions(full_state_dict=True)


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def main(folder: str, step: str, optimizer: str, *kinds: str) -> None:
    on_cpus()
    truth: dict[str, Any] = torch.load(Path(folder) / "truth.pt")
    half = truth["model"]["head.bias"].dtype == torch.bfloat16
    for kind in kinds:
        wrap = fsdp1 if kind == "fsdp1" else MESHES[kind]
        model = wrap(net(99, torch.bfloat16 if half else torch.float32))
        adam = OPTIMIZERS[optimizer]([*model.named_parameters()])
        report = ckptmap.load(f"{folder}/{step}", model, adam)
        loaded = get_model_state_dict(model, options=WHOLE)
        state = get_optimizer_state_dict(model, adam, options=WHOLE)["state"]
        rank, world = dist.get_rank(), dist.get_world_size()
        own = report.extra_per_rank.get("random", {})
        assert report.step == 10
        assert world != 2 or (own["cpu"].tolist() == [rank, 1] and own["seed"] == 5), own
        if rank == 0:
            _compare(truth, loaded, state)
        print(kind, "same")


def _compare(truth: dict[str, Any], loaded: dict[str, Any], state: dict[str, Any]) -> None:
    assert loaded.keys() == truth["model"].keys()
    for fqn, tensor in truth["model"].items():
        assert torch.equal(loaded[fqn], tensor), fqn
    saved = truth["optimizer"]
    for fqn, moments in state.items():
        for name, value in moments.items():
            expected = (
                saved["state"][fqn][name] if "state" in saved else saved[f"state.{fqn}.{name}"]
            )
            assert torch.equal(value, expected), (fqn, name)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()
