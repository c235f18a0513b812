"""FSDP1 on the CPU: SHARDED_STATE_DICT into DCP, FULL_STATE_DICT into torch.save.

`device_id=cpu` is what lets it run here, and `offload_to_cpu=False` keeps clear of its CPU
aliasing bug (moments equal to each other, storages of size 0).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.corpus.case import Gathered, case
from tests.corpus.models import Recipe, compiled, optimizer_for, tiny, train, truth
from tests.corpus.writers_ddp import save_on_rank_0
from tests.corpus.writers_single import (
    BF16,
    TIED,
    TIED_NAMES,
    compile_layers,
    parameters_truth,
)


def wrapped(model: nn.Module, use_orig_params: bool = True, **options: Any) -> FSDP:
    """Each layer a unit, the root another. Layers compiled before are wrapped around."""
    layers = getattr(model, "model", model).layers
    unit = {type(layer) for layer in layers}
    options = {"auto_wrap_policy": ModuleWrapPolicy(unit), **options}
    return FSDP(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params, **options)


def sharded_type(model: nn.Module) -> None:
    FSDP.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def full_type(model: nn.Module) -> None:
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )


def save_sharded(recipe: Recipe, use_orig_params: bool, path: Path) -> None:
    model = wrapped(tiny(recipe), use_orig_params)
    sharded_type(model)
    save_dcp(model.state_dict(), checkpoint_id=path)


for world_size in (2, 4):
    case(f"fsdp1_dcp_w{world_size}", world_size, "dcp", truth=truth)(
        partial(save_sharded, Recipe(), True)
    )
case("fsdp1_dcp_flat_w2", 2, "dcp", truth=truth, notes="use_orig_params=False")(
    partial(save_sharded, Recipe(), False)
)
case("fsdp1_dcp_bf16_w2", 2, "dcp", truth=partial(truth, BF16))(partial(save_sharded, BF16, True))
case("fsdp1_dcp_tied_w2", 2, "dcp", truth=partial(truth, TIED), tied=TIED_NAMES)(
    partial(save_sharded, TIED, True)
)


@case(
    "fsdp1_dcp_compiled_w2", 2, "dcp", truth=truth, prefix="_orig_mod.", wrappers=("_orig_mod",),
    notes="torch.compile(FSDP(model)).state_dict()",
)  # fmt: skip
def fsdp1_dcp_compiled(path: Path) -> None:
    model = wrapped(tiny())
    sharded_type(model)
    save_dcp(compiled(model).state_dict(), checkpoint_id=path)


@case(
    "fsdp1_dcp_compiled_layers_w2", 2, "dcp", truth=truth, wrappers=("_orig_mod",),
    notes="FSDP(compiled layer): layers.N._orig_mod.",
)  # fmt: skip
def fsdp1_dcp_compiled_layers(path: Path) -> None:
    model = wrapped(compile_layers(tiny()))
    sharded_type(model)
    save_dcp(model.state_dict(), checkpoint_id=path)


def gathered(model: FSDP, optimizer: torch.optim.Optimizer) -> Gathered:
    """FSDP1's own full state dicts."""
    full_type(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = FSDP.optim_state_dict(model, optimizer)["state"]
    return Gathered(weights, {n: {k: v.clone() for k, v in s.items()} for n, s in states.items()})


def save_training(use_orig_params: bool, path: Path) -> Gathered:
    model = wrapped(tiny(), use_orig_params)
    optimizer = (
        optimizer_for(model) if use_orig_params else torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    train(model, optimizer)
    sharded_type(model)
    state = {
        "model": model.state_dict(),
        "optimizer": FSDP.optim_state_dict(model, optimizer),
        "step": 3,
    }
    save_dcp(state, checkpoint_id=path)
    return gathered(model, optimizer)


case(
    "fsdp1_dcp_optimizer_w2", 2, "dcp", root=("model",), optimizer="fqn", extra={"step": 3}
)(partial(save_training, True))  # fmt: skip
case(
    "fsdp1_dcp_optimizer_flat_w2", 2, "dcp", root=("model",), optimizer="fqn", extra={"step": 3},
    notes="use_orig_params=False",
)(partial(save_training, False))  # fmt: skip


def save_full(recipe: Recipe, use_orig_params: bool, path: Path) -> None:
    model = wrapped(tiny(recipe), use_orig_params)
    full_type(model)
    save_on_rank_0(model.state_dict(), path)


case("fsdp1_full_w2", 2, "torch", file="model.pt", truth=truth)(partial(save_full, Recipe(), True))
case("fsdp1_full_flat_bf16_w2", 2, "torch", file="model.pt", truth=partial(truth, BF16))(
    partial(save_full, BF16, False)
)


@case(
    "fsdp1_full_optimizer_w2", 2, "torch", file="checkpoint.pt", root=("model",), optimizer="fqn",
    extra={"step": 3},
)  # fmt: skip
def fsdp1_full_optimizer(path: Path) -> Gathered:
    model = wrapped(tiny())
    optimizer = optimizer_for(model)
    train(model, optimizer)
    full_type(model)
    state = {
        "model": model.state_dict(),
        "optimizer": FSDP.optim_state_dict(model, optimizer),
        "step": 3,
    }
    save_on_rank_0(state, path)
    return gathered(model, optimizer)


@case(
    "fsdp1_params_w2", 2, "torch", file="ema.pt", truth=parameters_truth,
    prefix="_fsdp_wrapped_module.", wrappers=("_fsdp_wrapped_module",),
    notes="named_parameters() of NO_SHARD: the segment at the root and in every layer",
)  # fmt: skip
def fsdp1_params(path: Path) -> None:
    model = wrapped(tiny(), sharding_strategy=ShardingStrategy.NO_SHARD)
    save_on_rank_0({name: p.detach().clone() for name, p in model.named_parameters()}, path)
