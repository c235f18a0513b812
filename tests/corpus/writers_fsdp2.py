"""FSDP2 (`fully_shard`, a mesh of 1, 2 or 4 ranks, HSDP): DCP directories, full and rank files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.corpus.case import Gathered, case
from tests.corpus.models import Recipe, Tiny, compiled, optimizer_for, tiny, train, truth
from tests.corpus.writers_ddp import save_on_rank_0
from tests.corpus.writers_single import BF16, TIED, TIED_NAMES, compile_layers

EVEN = Recipe(vocab=1000, ffn=104, tied=False)
"""All of dim 1 divides by 2, which FSDP2 asks for where it cuts dim 1."""


def sharded(model: Tiny, mesh: DeviceMesh | None = None, **options: Any) -> Tiny:
    """Each layer a unit, then the root, as the tutorials do."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def gathered(model: Tiny, optimizer: torch.optim.Optimizer | None = None) -> Gathered:
    """The full tensors by name, over `DTensor.full_tensor`; every rank takes part."""
    weights = {name: full(value) for name, value in model.state_dict().items()}
    if optimizer is None:
        return Gathered(weights)
    states = {
        name: {key: full(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
    }
    return Gathered(weights, states)


def save_model(recipe: Recipe, path: Path) -> None:
    save_dcp(get_model_state_dict(sharded(tiny(recipe))), checkpoint_id=path)


for world_size in (2, 4):
    case(f"fsdp2_dcp_w{world_size}", world_size, "dcp", truth=truth)(partial(save_model, Recipe()))
    case(f"fsdp2_dcp_bf16_w{world_size}", world_size, "dcp", truth=partial(truth, BF16))(
        partial(save_model, BF16)
    )
case("fsdp2_dcp_tied_w2", 2, "dcp", truth=partial(truth, TIED), tied=TIED_NAMES)(
    partial(save_model, TIED)
)


def save_training(path: Path) -> Gathered:
    model = sharded(tiny())
    optimizer = optimizer_for(model)
    train(model, optimizer)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 3,
    }
    save_dcp(state, checkpoint_id=path)
    return gathered(model, optimizer)


for world_size in (2, 4):
    case(
        f"fsdp2_dcp_optimizer_w{world_size}", world_size, "dcp", root=("model",),
        optimizer="fqn", extra={"step": 3},
    )(save_training)  # fmt: skip


@case(
    "fsdp2_dcp_compiled_w2", 2, "dcp", truth=truth, prefix="_orig_mod.", wrappers=("_orig_mod",),
    notes="raw model.state_dict() of a compiled model",
)  # fmt: skip
def fsdp2_dcp_compiled(path: Path) -> None:
    model = compiled(sharded(tiny()))
    save_dcp(model.state_dict(), checkpoint_id=path)


@case("fsdp2_dcp_compiled_layers_w2", 2, "dcp", truth=truth, wrappers=("_orig_mod",))
def fsdp2_dcp_compiled_layers(path: Path) -> None:
    save_dcp(sharded(compile_layers(tiny())).state_dict(), checkpoint_id=path)


def cut_columns(parameter: nn.Parameter) -> Shard:
    """Matrices by dim 1, the rest by dim 0."""
    return Shard(1) if parameter.ndim == 2 else Shard(0)


@case(
    "fsdp2_dcp_shard1_w2", 2, "dcp", truth=partial(truth, EVEN),
    notes="matrices cut by columns (shard_placement_fn)",
)  # fmt: skip
def fsdp2_dcp_shard1(path: Path) -> None:
    model = sharded(tiny(EVEN), shard_placement_fn=cut_columns)
    save_dcp(get_model_state_dict(model), checkpoint_id=path)


@case(
    "fsdp2_dcp_many_files_w2", 2, "dcp", truth=truth, notes="one .distcp file an item"
)  # fmt: skip
def fsdp2_dcp_many_files(path: Path) -> None:
    writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
    save_dcp(get_model_state_dict(sharded(tiny())), storage_writer=writer)


@case(
    "fsdp2_dcp_stale_w2", 2, "dcp", truth=truth,
    notes="saved twice into one directory: files of the first save remain, unnamed by .metadata",
)  # fmt: skip
def fsdp2_dcp_stale(path: Path) -> None:
    first = get_model_state_dict(sharded(tiny(Recipe(seed=9))))
    writer = FileSystemWriter(path, single_file_per_rank=False)
    save_dcp(first, storage_writer=writer)
    save_dcp(get_model_state_dict(sharded(tiny())), checkpoint_id=path)


@case(
    "hsdp_dcp_w4", 4, "dcp", truth=truth, notes="2 replicas x 2 shards; replicas stored once"
)  # fmt: skip
def hsdp_dcp(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    save_dcp(get_model_state_dict(sharded(tiny(), mesh)), checkpoint_id=path)


@case("fsdp2_full_w2", 2, "torch", file="model.pt", truth=truth)
def fsdp2_full(path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    save_on_rank_0(get_model_state_dict(sharded(tiny()), options=options), path)


# ------------------------------------------------------------------------------- rank files


def rank_file(folder: Path, kind: str = "model") -> Path:
    """verl's naming, which its forks and most home-made trainers follow."""
    return folder / f"{kind}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


def save_ranks(recipe: Recipe, path: Path) -> None:
    torch.save(sharded(tiny(recipe)).state_dict(), rank_file(path))


for world_size in (1, 2, 4):
    case(
        f"fsdp2_ranks_w{world_size}", world_size, "ranks", truth=truth,
        notes="uneven shards, an empty one at 4 ranks, plain buffers",
    )(partial(save_ranks, Recipe()))  # fmt: skip
case("fsdp2_ranks_bf16_w2", 2, "ranks", truth=partial(truth, BF16))(partial(save_ranks, BF16))
case(
    "fsdp2_ranks_tied_w2", 2, "ranks", truth=partial(truth, TIED), tied=TIED_NAMES,
    notes="true aliases inside each file",
)(partial(save_ranks, TIED))  # fmt: skip


@case(
    "fsdp2_ranks_compiled_w2", 2, "ranks", truth=truth, prefix="_orig_mod.",
    wrappers=("_orig_mod",),
)  # fmt: skip
def fsdp2_ranks_compiled(path: Path) -> None:
    model = compiled(sharded(tiny()))
    torch.save(model.state_dict(), rank_file(path))


@case(
    "fsdp2_ranks_shard1_w2", 2, "ranks", truth=partial(truth, EVEN), notes="matrices cut by columns"
)  # fmt: skip
def fsdp2_ranks_shard1(path: Path) -> None:
    model = sharded(tiny(EVEN), shard_placement_fn=cut_columns)
    torch.save(model.state_dict(), rank_file(path))


@case(
    "hsdp_ranks_w4", 4, "ranks", truth=truth,
    notes="a 2-D mesh: (Replicate, Shard(0)); ranks 0 and 2, 1 and 3 hold the same",
)  # fmt: skip
def hsdp_ranks(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.save(sharded(tiny(), mesh).state_dict(), rank_file(path))


@case(
    "fsdp2_ranks_nested_w2", 2, "ranks", root=("model",), optimizer="index",
    order="the order of the saved model dict", extra={"step": 3},
    notes="each file {model, optimizer, step}; optimizer by index",
)  # fmt: skip
def fsdp2_ranks_nested(path: Path) -> Gathered:
    model = sharded(tiny())
    optimizer = optimizer_for(model)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state, rank_file(path))
    return gathered(model, optimizer)
