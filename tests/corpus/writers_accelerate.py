"""accelerate's `save_state` for FSDP1, FSDP2 and DDP, on CPU ranks.

accelerate enters its FSDP code only from an accelerator's distributed type: it is told so while
the `Accelerator` is built, and gets its CPU device back afterwards. All that follows is its own.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tests.corpus.case import Gathered, case
from tests.corpus.models import Layer, Tiny, moments, optimizer_for, tiny, train
from tests.corpus.writers_fsdp1 import gathered as gathered_fsdp1
from tests.corpus.writers_fsdp2 import gathered as gathered_fsdp2


def fsdp_plugin(version: int, kind: str) -> Any:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    full = kind == "FULL_STATE_DICT"
    options: dict[str, Any] = {"rank0_only": False} if full else {}
    state = FullStateDictConfig if full else ShardedStateDictConfig
    optim = FullOptimStateDictConfig if full else ShardedOptimStateDictConfig
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        state_dict_type=kind,
        state_dict_config=state(offload_to_cpu=False, **options) if version == 1 else None,
        optim_state_dict_config=optim(offload_to_cpu=False, **options) if version == 1 else None,
        use_orig_params=True if version == 1 else None,
        cpu_ram_efficient_loading=False,
    )


def accelerator(plugin: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DataLoaderConfiguration, DistributedType

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    shared = PartialState(cpu=True)._shared_state
    if plugin is not None:
        shared["distributed_type"] = DistributedType.MULTI_GPU
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    made = Accelerator(cpu=True, fsdp_plugin=plugin, dataloader_config=loading)
    for state in (made.state._shared_state, shared):
        state["device"] = torch.device("cpu")
    return made


Prepared = tuple[Any, nn.Module, torch.optim.Optimizer]


def prepared(plugin: Any) -> Prepared:
    """The accelerator, and model and optimizer as it wraps them, after two steps."""
    before = dict(os.environ)
    made = accelerator(plugin)
    inner = tiny()
    model, optimizer = made.prepare(inner, optimizer_for(inner))
    for key in set(os.environ) - set(before):
        del os.environ[key]  # FSDP_* and ACCELERATE_* would reach the next case
    train(model, optimizer.optimizer)
    return made, model, optimizer.optimizer


def save_fsdp(version: int, kind: str, path: Path) -> Gathered:
    made, model, optimizer = prepared(fsdp_plugin(version, kind))
    made.save_state(str(path.parent))
    gather: Any = gathered_fsdp1 if version == 1 else gathered_fsdp2
    gathered: Gathered = gather(model, optimizer)
    return gathered


SIBLING = "save_state(): the optimizer is in optimizer_0 beside it"

for version in (1, 2):
    case(
        f"accelerate_fsdp{version}_w2", 2, "dcp", file="pytorch_model_fsdp_0", root=("model",), shimmed=True,
        notes=SIBLING,
    )(partial(save_fsdp, version, "SHARDED_STATE_DICT"))  # fmt: skip
# FSDP1 with FULL_STATE_DICT is missing: accelerate sets offload_to_cpu, which crashes on the CPU.
case(
    "accelerate_fsdp2_full_w2", 2, "torch", file="pytorch_model_fsdp.bin", shimmed=True,
    notes="save_state(): the optimizer is in optimizer.bin beside it",
)(partial(save_fsdp, 2, "FULL_STATE_DICT"))  # fmt: skip


@case("accelerate_fsdp2_save_model_w2", 2, "hf", shimmed=True, notes="save_model(): no config.json")
def save_model(path: Path) -> Gathered:
    made, model, optimizer = prepared(fsdp_plugin(2, "SHARDED_STATE_DICT"))
    made.save_model(model, str(path), max_shard_size="200KB")
    return gathered_fsdp2(cast(Tiny, model), optimizer)


@case(
    "accelerate_ddp_w2", 2, "safetensors", file="model.safetensors", shimmed=True,
    notes="save_state() unwraps: no module.",
)  # fmt: skip
def save_ddp(path: Path) -> Gathered:
    made, model, optimizer = prepared(None)
    made.save_state(str(path.parent))
    inner = model.get_submodule("module")
    return Gathered(inner.state_dict(), moments(inner, optimizer))
