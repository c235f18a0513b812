"""Directories as frameworks leave them, by their own writers, and DCP in safetensors form.

Not in the table of cases: a directory is no single format. The fixture `framework_directories` has
them built once a session; `sample(DIR, name)` opens one.

verl is not installed here; what its FSDP checkpoint manager (0.9.1) does is written with the same
calls: torch.save of `model.state_dict()`, `optimizer.state_dict()` and a dict of scheduler and RNG
states, one file a rank. torchtitan (0.3) likewise: dcp.save of bare model FQNs and of Stateful
objects whose optimizer state is flattened.
"""

from __future__ import annotations

import argparse
import os
import random
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.corpus.build import COLLECTIVE_TIMEOUT_S, build
from tests.corpus.case import Case, Gathered, Spec, Writer
from tests.corpus.models import Tiny, moments, optimizer_for, tiny, tiny_llama, train
from tests.corpus.writers_accelerate import accelerator, fsdp_plugin
from tests.corpus.writers_fsdp1 import gathered as gathered_fsdp1
from tests.corpus.writers_fsdp2 import gathered as gathered_fsdp2
from tests.corpus.writers_fsdp2 import sharded

SAMPLES: dict[str, Spec] = {}


def directory(name: str, world_size: int) -> Callable[[Writer], Writer]:
    def register(write: Writer) -> Writer:
        assert name not in SAMPLES, name
        SAMPLES[name] = Spec(name, world_size, "hf", write, optimizer="fqn")
        return write

    return register


def sample(folder: Path, name: str) -> Case:
    return Case(SAMPLES[name], folder)


# ------------------------------------------------------------------------------- accelerate


class Counter:
    """A custom object, as `register_for_checkpointing` takes it."""

    def __init__(self, seen: int = 0) -> None:
        self.state: dict[str, Any] = {
            "seen": seen, "window": torch.arange(5.0) * bool(seen), "at": (3, None)
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


Prepared = tuple[Any, Any, torch.optim.Optimizer]


def prepared(plugin: Any = None, with_rest: bool = False, fresh: bool = False) -> Prepared:
    """The accelerator, the model it wraps and the inner optimizer, after two steps. The rest: two
    schedulers, a loader whose sampler has a seed, a custom object; `fresh`: as before the steps."""
    before = dict(os.environ)
    made = accelerator(plugin)
    inner = tiny()
    model, optimizer = made.prepare(inner, optimizer_for(inner))
    if with_rest:
        for size in (3, 5):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=size)
            made.prepare(scheduler)
            scheduler.last_epoch = 0 if fresh else 4 + size
        made.prepare(torch.utils.data.DataLoader(Tokens(), shuffle=True))
        made.register_for_checkpointing(Counter(0 if fresh else 41))
        made.step = 0 if fresh else 3
    for key in set(os.environ) - set(before):
        del os.environ[key]
    train(model, optimizer.optimizer)
    return made, model, optimizer.optimizer


def gathered_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Gathered:
    inner = model.get_submodule("module") if hasattr(model, "module") else model
    weights = {name: value.clone() for name, value in inner.state_dict().items()}
    return Gathered(weights, moments(inner, optimizer))


@directory("accelerate_w1", 1)
def accelerate_single(path: Path) -> Gathered:
    made, model, optimizer = prepared(with_rest=True)
    made.save_state(str(path))
    return gathered_plain(model, optimizer)


@directory("accelerate_bin_w2", 2)
def accelerate_bin(path: Path) -> Gathered:
    made, model, optimizer = prepared(with_rest=True)
    made.save_state(str(path), safe_serialization=False)
    return gathered_plain(model, optimizer)


@directory("accelerate_two_models_w1", 1)
def accelerate_two(path: Path) -> Gathered:
    made, model, optimizer = prepared()
    made.prepare(nn.Linear(3, 5))
    made.save_state(str(path))
    return gathered_plain(model, optimizer)


@directory("accelerate_ranks_w2", 2)
def accelerate_ranks(path: Path) -> Gathered:
    """SHARDED_STATE_DICT with use_dcp=False, which save_state itself has no option for."""
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    plugin = fsdp_plugin(2, "SHARDED_STATE_DICT")
    made, model, optimizer = prepared(plugin)
    save_fsdp_model(plugin, made, model, str(path), use_dcp=False)
    save_fsdp_optimizer(plugin, made, optimizer, model, str(path), use_dcp=False)
    return gathered_fsdp2(model, optimizer)


def accelerate_sharded(version: int, path: Path) -> Gathered:
    made, model, optimizer = prepared(fsdp_plugin(version, "SHARDED_STATE_DICT"), with_rest=True)
    made.save_state(str(path))
    gather: Any = gathered_fsdp1 if version == 1 else gathered_fsdp2
    gathered: Gathered = gather(model, optimizer)
    return gathered


for version in (1, 2):
    directory(f"accelerate_fsdp{version}_w2", 2)(partial(accelerate_sharded, version))


@directory("accelerate_full_w2", 2)
def accelerate_full(path: Path) -> Gathered:
    made, model, optimizer = prepared(fsdp_plugin(2, "FULL_STATE_DICT"), with_rest=True)
    made.save_state(str(path))
    return gathered_fsdp2(model, optimizer)


# ------------------------------------------------------------------------------- Trainer


class Tokens(torch.utils.data.Dataset[Any]):
    """Four fixed sentences."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        tokens = (torch.arange(8) * 7 + index * 13) % 256
        return {"input_ids": tokens, "labels": tokens}


def trainer(path: Path, steps: int = 2) -> Any:
    """A Trainer of a tiny Llama that saves after its second step."""
    from transformers import Trainer, TrainingArguments

    before = dict(os.environ)
    arguments = TrainingArguments(
        str(path), max_steps=steps, save_steps=2, per_device_train_batch_size=1, use_cpu=True,
        report_to=[], logging_steps=1, disable_tqdm=True, learning_rate=1e-2, weight_decay=0.1,
    )  # fmt: skip
    made = Trainer(tiny_llama(dtype=torch.float32), arguments, train_dataset=Tokens())
    for key in set(os.environ) - set(before):
        del os.environ[key]
    return made


def fresh_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@directory("trainer_w1", 1)
def trainer_single(path: Path) -> Gathered:
    return trainer_plain(path)


@directory("trainer_ddp_w2", 2)
def trainer_ddp(path: Path) -> Gathered:
    return trainer_plain(path)


def trainer_plain(path: Path) -> Gathered:
    fresh_accelerate()
    made = trainer(path)
    made.train()
    return gathered_plain(made.model, made.optimizer.optimizer)


def trainer_fsdp(kind: str, path: Path) -> Gathered:
    """Trainer's own accelerator, told that it is on GPUs while it is built (see accelerate)."""
    fresh_accelerate()
    made = trainer(path)
    made.accelerator = accelerator(llama_plugin(kind))
    made.is_fsdp_enabled = True
    made.train()
    return gathered_fsdp2(made.model, made.optimizer.optimizer)


def llama_plugin(kind: str) -> Any:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    plugin = fsdp_plugin(2, kind)
    plugin.auto_wrap_policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return plugin


for kind in ("SHARDED", "FULL"):
    directory(f"trainer_fsdp_{kind.lower()}_w2", 2)(partial(trainer_fsdp, f"{kind}_STATE_DICT"))


# ------------------------------------------------------------------------------- verl


@directory("verl_w2", 2)
def verl(path: Path) -> Gathered:
    import json

    import numpy as np

    model = sharded_llama()
    optimizer = optimizer_for(model)
    train_llama(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    rng = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    folder = path / "actor"
    folder.mkdir(exist_ok=True)
    name = f"world_size_2_rank_{dist.get_rank()}.pt"
    torch.save(model.state_dict(), folder / f"model_{name}")
    torch.save(optimizer.state_dict(), folder / f"optim_{name}")
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": rng}
    torch.save(extra, folder / f"extra_state_{name}")
    if dist.get_rank() == 0:
        torch.save({"_sampler_iter_yielded": 1}, path / "data.pt")
        model.config.save_pretrained(folder / "huggingface")
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    return gathered_fsdp2(model, optimizer)


def sharded_llama() -> Any:
    from tests.support.cpu_sharding import fully_shard

    model: Any = tiny_llama(dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train_llama(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for item in (Tokens()[0], Tokens()[1]):
        tokens = item["input_ids"][None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------- torchtitan


class Container:
    """Stateful, as torchtitan's OptimizersContainer: the state flattened by FQN."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@directory("titan_w2", 2)
def titan(path: Path) -> Gathered:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model = sharded(tiny())
    optimizer = optimizer_for(model)
    train(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    state = {
        "optimizer": Container(model, optimizer),
        "lr_scheduler": scheduler,
        "train_state": {"step": torch.tensor(2), "ntokens_seen": torch.tensor(32)},
        f"dataloader.dp_rank_{dist.get_rank()}": {"next": 5},
    }
    state.update(get_model_state_dict(model))
    save(state, checkpoint_id=path / "step-2")
    return gathered_fsdp2(model, optimizer)


# ------------------------------------------------------------------------------- Lightning


@directory("lightning_w2", 2)
def lightning(path: Path) -> Gathered:
    """As lightning 2.6 under ModelParallelStrategy: Trainer's `save_checkpoint`, step by step."""
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_saver import save

    model = sharded(tiny())
    optimizer = optimizer_for(model)
    train(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    shards = {
        "state_dict": get_model_state_dict(model),
        "optimizer_0": get_optimizer_state_dict(model, optimizer),
    }
    save(shards, checkpoint_id=path)
    if dist.get_rank() == 0:
        beside = {
            "epoch": 1,
            "global_step": 2,
            "pytorch-lightning_version": "2.6.6",
            "lr_schedulers": [scheduler.state_dict()],
            "hyper_parameters": {"width": 64},
            "seen": torch.arange(3),
        }
        torch.save(beside, path / "meta.pt")
    return gathered_fsdp2(model, optimizer)


# ------------------------------------------------------------------------------- DCP, safetensors


def dcp_hf(path: Path, state: Mapping[str, Any] | None = None, **options: Any) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(path), save_distributed=True, **options)
    save(dict(state or {}), storage_writer=writer)


def tiny_state() -> tuple[Tiny, dict[str, Any]]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = sharded(tiny())
    return model, get_model_state_dict(model)


@directory("dcp_hf_w2", 2)
def dcp_hf_one(path: Path) -> Gathered:
    model, state = tiny_state()
    dcp_hf(path, state)
    return gathered_fsdp2(model)


@directory("dcp_hf_even_w2", 2)
def dcp_hf_even(path: Path) -> Gathered:
    """Every tensor is cut into equal halves."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = sharded_llama()
    dcp_hf(path, get_model_state_dict(model))
    return gathered_fsdp2(model)


@directory("dcp_hf_files_w2", 2)
def dcp_hf_files(path: Path) -> Gathered:
    """Tensors spread over three files a rank."""
    model, state = tiny_state()
    dcp_hf(path, state, fqn_to_index_mapping={key: 1 + i % 3 for i, key in enumerate(state)})
    return gathered_fsdp2(model)


@directory("dcp_hf_consolidated_w2", 2)
def dcp_hf_consolidated(path: Path) -> Gathered:
    """Floats of one dim and more only: torch 2.13 fails on, or zeroes, the others."""
    model, state = tiny_state()
    state = {k: v for k, v in state.items() if v.is_floating_point() and v.ndim}
    dcp_hf(path, state, enable_consolidation=True)
    weights = gathered_fsdp2(model).model
    return Gathered({key: weights[key] for key in state})


# ------------------------------------------------------------------------------- all of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    for spec in SAMPLES.values():
        if spec.world_size == dist.get_world_size():
            print(spec.name, flush=True)
            build(spec, options.out, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
