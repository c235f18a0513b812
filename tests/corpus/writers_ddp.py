"""DistributedDataParallel, alone and with torch.compile on either side: rank 0 saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.corpus.case import Gathered, case
from tests.corpus.models import (
    compiled,
    moments,
    nested,
    nested_truth,
    optimizer_for,
    tiny,
    train,
    truth,
)
from tests.corpus.writers_single import compile_layers


def save_on_rank_0(value: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path)


@case(
    "ddp_w2", 2, "torch", file="model.pt", truth=truth, prefix="module.", wrappers=("module",)
)  # fmt: skip
def ddp(path: Path) -> None:
    save_on_rank_0(DDP(tiny()).state_dict(), path)


@case(
    "ddp_of_compiled_w2", 2, "torch", file="model.pt", truth=truth, prefix="module._orig_mod.",
    wrappers=("module", "_orig_mod"),
)  # fmt: skip
def ddp_of_compiled(path: Path) -> None:
    model = compiled(tiny())
    save_on_rank_0(DDP(model).state_dict(), path)


@case(
    "compiled_ddp_w2", 2, "torch", file="model.pt", truth=truth, prefix="_orig_mod.module.",
    wrappers=("_orig_mod", "module"),
)  # fmt: skip
def compiled_ddp(path: Path) -> None:
    save_on_rank_0(compiled(DDP(tiny())).state_dict(), path)


@case(
    "ddp_compiled_layers_w2", 2, "torch", file="model.pt", truth=truth, prefix="module.",
    wrappers=("module", "_orig_mod"), notes="module.layers.N._orig_mod.",
)  # fmt: skip
def ddp_compiled_layers(path: Path) -> None:
    save_on_rank_0(DDP(compile_layers(tiny())).state_dict(), path)


@case(
    "ddp_module_attribute_w2", 2, "torch", file="model.pt", truth=nested_truth, prefix="module.",
    wrappers=("module",), notes="module.module.weight is the wrapped model's own module.weight",
)  # fmt: skip
def ddp_module_attribute(path: Path) -> None:
    save_on_rank_0(DDP(nested()).state_dict(), path)


@case(
    "ddp_nested_w2", 2, "torch", file="checkpoint.pt", root=("state", "model"), prefix="module.",
    wrappers=("module",), extra={"epoch": 2},
    notes="two levels of dict above the model",
)  # fmt: skip
def ddp_nested(path: Path) -> Gathered:
    inner = tiny()
    model = DDP(inner)
    optimizer = optimizer_for(inner)
    train(model, optimizer)
    save_on_rank_0({"state": {"model": model.state_dict()}, "epoch": 2}, path)
    return Gathered(inner.state_dict(), moments(inner, optimizer))
