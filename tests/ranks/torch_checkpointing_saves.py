"""Save with torch_checkpointing's own manager (0.1.1) on CPUs, and keep beside it what was saved.

python -m tests.ranks.torch_checkpointing_saves FOLDER

Writes for each of `CASES` of this world size FOLDER/NAME/step-10 and step-20, which one manager saved, the
second without metadata.pkl, and FOLDER/NAME/truth.pt: every tensor whole.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch_checkpointing.checkpoint_layout import (
    JsonSerialization,
    LayoutInfo,
    RawSerialization,
    SafetensorsSerialization,
    TorchSerialization,
)
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.state_transformations import optimizer_transform_pre
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from tests.support.torch_checkpointing_cases import CASES, Case

RESHARDED = ("model", "optimizer", "ema")
FORMATS: dict[str, Callable[[str], LayoutInfo]] = {
    "safetensors": lambda key: LayoutInfo(
        f"{key}_{{rank}}.safetensors", SafetensorsSerialization()
    ),
    "folder": lambda key: LayoutInfo(f"rank_{{rank}}/{key}.pt", TorchSerialization()),
    "json": lambda key: LayoutInfo(f"{key}.json", JsonSerialization()),
    "raw": lambda key: LayoutInfo(f"{key}.bin", RawSerialization()),
    "shared": lambda key: LayoutInfo(f"{key}.pt", TorchSerialization()),
}


def on_cpus() -> None:
    """Let the library gather its metadata on CPUs: 0.1.1 moves the pickled bytes to a GPU for that."""
    made = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return made(*args, **kwargs)

    torch.tensor = tensor
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign,assignment]
    logging.disable(logging.WARNING)


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Blocks, a head of 3 rows (of 4 ranks one has none), and buffers: a scalar, bools, one without elements."""

    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("mask", torch.arange(6).reshape(2, 3) % 2 == 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def net(seed: int, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def plain(model: nn.Module) -> nn.Module:
    return model


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    return _wrapped(model, mesh)


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rep", "shard"))
    return _wrapped(model, mesh)


def tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})  # type: ignore[arg-type]
    return _wrapped(model, mesh["dp"])


def _wrapped(model: nn.Module, mesh: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return model


def stages(model: nn.Module) -> nn.Module:
    """Two stages of a pipeline, each with FSDP2 over a mesh of its own; a buffer that the last one alone has."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    last = mesh.get_local_rank("pp") == 1
    model.blocks[0 if last else 1] = nn.Identity()  # type: ignore[index,operator]
    if last:
        model.embed = nn.Identity()
        model.register_buffer("late", torch.arange(4.0))
    else:
        model.head = nn.Identity()
    fully_shard(model, mesh=mesh["dp"])
    return model


MESHES = {"plain": plain, "fsdp2": fsdp2, "hsdp": hsdp, "tp": tp, "stages": stages}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2, foreach=False),
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9, foreach=False),
}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randint(0, 11, (2, 5))).float().square().mean().backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()


def whole(value: Any) -> Any:
    """Return the values of a state dict with every tensor whole. All ranks call it."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole(item) for item in value]
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def manager(layouts: Mapping[str, str], resharded: Sequence[str] = RESHARDED) -> CheckpointManager:
    """Return a manager as torchtitan configures it, but for saves that block."""
    items = {
        key: ItemSpec(
            resharder=DefaultResharder() if key in resharded else None,
            layout=FORMATS[layouts[key]](key) if key in layouts else None,
            required=False,
        )
        for key in {*resharded, *layouts}
    }
    return CheckpointManager.Config(
        items=items,
        default=ItemSpec(requires_copy=False),
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()


def optimizer_item(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> dict[str, Any]:
    if form == "flat":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return get_optimizer_state_dict(model, optimizer, options=options)
    state = optimizer.state_dict()
    return optimizer_transform_pre(state) if form == "v1" else state


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return a model and its optimizer after two steps."""
    model = MESHES[case.mesh](net(3, torch.bfloat16 if case.is_half else torch.float32))
    optimizer = None
    if case.optimizer:
        optimizer = OPTIMIZERS[case.optimizer]([*model.named_parameters()])
    if case.mesh == "stages":  # a stage alone cannot run forward
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert optimizer is not None
        optimizer.step()
    else:
        trained(model, optimizer)
    return model, optimizer


def items(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return what this rank passes to the manager."""
    rank = dist.get_rank()
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer_item(model, optimizer, case.form)
    average = model.state_dict().get("head.bias")
    state["ema"] = {"shadows": [] if average is None else [average, torch.arange(3)], "decay": 0.5}
    state |= {"step": 10, "train_state": {"ntokens": torch.tensor(20), "loss": None}}
    state["dataloader"] = {f"dp_rank_{rank}": bytes([rank]), "world_size": dist.get_world_size()}
    state["random"] = {"cpu": torch.tensor([rank, 1]), "seed": 5}
    if rank == 0:
        of_one = {
            "settings": {"lr": 0.5, "names": ["a"]},
            "blob": b"raw",
            "lr_scheduler": {"last_epoch": 2},
        }
        state |= {key: of_one[key] for key in case.layouts if key in of_one}
    return state


def main(folder: str) -> None:
    on_cpus()
    for name, case in CASES[dist.get_world_size()].items():
        model, optimizer = made(case)
        state = items(case, model, optimizer)
        saves = manager(case.layouts)
        for step in (10, 20):
            saves.save(f"{folder}/{name}/step-{step}", state)
        saves.close()
        truth = whole({key: state[key] for key in ("model", "optimizer", "ema") if key in state})
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, truth)
        for other in of_ranks:  # those of the stages; else all are the same
            truth["model"] |= other["model"]
            truth["ema"] = max(truth["ema"], other["ema"], key=lambda ema: len(ema["shadows"]))
            if "state" in truth.get("optimizer", {}):
                truth["optimizer"]["state"] |= other["optimizer"]["state"]
        if dist.get_rank() == 0:
            torch.save(truth, Path(folder) / name / "truth.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()
