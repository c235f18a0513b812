"""FSDP on 2 ranks: goes on from what ckptmap wrote of one process, and saves for one to go on.

python -m tests.ranks.optimizer FOLDER      one rank of many; FOLDER holds `converted/`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.corpus.models import optimizer_for, tiny
from tests.corpus.writers_fsdp1 import wrapped
from tests.corpus.writers_fsdp2 import gathered, sharded

STEPS = 3
Model = TypeVar("Model", bound=nn.Module)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0) -> list[float]:
    """STEPS real steps over tokens that depend on the step alone; the loss before each."""
    found = []
    for step in range(start, start + STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        loss = model(torch.randint(0, 256, (2, 8), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def resumed(path: Path, model: Model) -> tuple[Model, torch.optim.Optimizer]:
    """A fresh model and its optimizer, filled by torch's own loaders."""
    optimizer = optimizer_for(model, lr=1.0)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return model, optimizer


def main(folder: Path) -> None:
    model, optimizer = resumed(folder / "converted", sharded(tiny()))
    first = losses(model, optimizer, start=STEPS)
    fsdp1 = losses(*resumed(folder / "converted", wrapped(tiny())), start=STEPS)
    model = sharded(tiny())
    optimizer = optimizer_for(model)
    losses(model, optimizer)
    save(folder / "nested", model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    save(folder / "flattened", model, optimizer, flat)
    truth = gathered(model, optimizer)
    second = losses(model, optimizer, start=STEPS)
    if dist.get_rank() == 0:
        torch.save({"model": dict(truth.model), "optimizer": dict(truth.optimizer)}, folder / "t")
        (folder / "losses.json").write_text(
            json.dumps({"fsdp2": first, "fsdp1": fsdp1, "went_on": second})
        )


def save(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: StateDictOptions | None = None,
) -> None:
    state: Mapping[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
