"""What a writer of goldens had in memory, kept beside what it wrote.

{"weights/NAME": tensor, "optimizer/NAME/exp_avg": tensor, ...} -> truth.safetensors
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.corpus.case import Gathered

FILE = "truth.safetensors"


def whole(value: Tensor) -> Tensor:
    """A copy that is cut over no ranks. Every rank calls it."""
    gather: Any = getattr(value, "full_tensor", None)
    return (gather() if gather else value).detach().clone().contiguous()


def truth_of(model: nn.Module, optimizer: Any = None) -> dict[str, Tensor]:
    """Every rank calls it."""
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    moments = {
        name: {state: whole(torch.as_tensor(v)) for state, v in optimizer.state[parameter].items()}
        for name, parameter in (model.named_parameters() if optimizer is not None else ())
    }
    return flattened(Gathered(weights, moments))


def flattened(found: Gathered) -> dict[str, Tensor]:
    saved = {f"weights/{name}": value for name, value in found.model.items()}
    for name, states in found.optimizer.items():
        saved |= {f"optimizer/{name}/{state}": value for state, value in states.items()}
    return saved


def put_truth(folder: Path, found: dict[str, Tensor], rank: int = 0) -> None:
    if rank == 0:
        save_file(found, folder / FILE)


def weights(folder: Path) -> dict[str, Tensor]:
    return under("weights/", folder)


def moments(folder: Path) -> dict[str, dict[str, Tensor]]:
    """By the parameter's name."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in under("optimizer/", folder).items():
        name, _, state = key.rpartition("/")
        found.setdefault(name, {})[state] = value
    return found


def under(prefix: str, folder: Path) -> dict[str, Tensor]:
    saved = load_file(folder / FILE)
    return {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
