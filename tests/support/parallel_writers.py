"""Model-parallel files as Meta publishes them and as Megatron-LM saves them, from whole models.

That they are cut so is held against tables of what the libraries' own layers hold:
tests/golden/parallel.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Tensor]

META_COLUMNS = ("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight", "output.weight")
META_ROWS = ("wo.weight", "w2.weight")
LLAMA_PARAMS: dict[str, Any] = {
    "dim": 120,
    "n_layers": 2,
    "n_heads": 12,
    "n_kv_heads": 4,
    "vocab_size": 102,
    "multiple_of": 56,
    "ffn_dim_multiplier": 0.1,
    "norm_eps": 1e-06,
    "rope_theta": 10000.0,
}
"""Of the tiny `llama` of tests.support.mapping_configs."""


def meta_rank(state: State, rank: int, world: int, by_columns: bool) -> dict[str, Tensor]:
    """What a rank's file holds; `by_columns`: the embedding as Llama 2 cuts it."""
    return {key: _part(key, value, rank, world, by_columns) for key, value in state.items()}


def _part(key: str, value: Tensor, rank: int, world: int, by_columns: bool) -> Tensor:
    dim = 0 if key.endswith(META_COLUMNS) else 1 if key.endswith(META_ROWS) else None
    if key == "tok_embeddings.weight":
        dim = 1 if by_columns else 0
    if dim is None:
        return value.clone()
    assert value.shape[dim] % world == 0, key
    return value.chunk(world, dim)[rank].clone()


def write_meta(
    folder: Path,
    state: State,
    world: int,
    params: Mapping[str, Any] | None = None,
    by_columns: bool = False,
) -> Path:
    """`consolidated.0R.pth` a rank, and params.json where there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        held = meta_rank(state, rank, world, by_columns)
        torch.save(held, folder / f"consolidated.{rank:02d}.pth")
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return folder


# --------------------------------------------------------------------------- Megatron-LM

ROWS = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")
FC1 = ("linear_fc1.weight", "linear_fc1.bias")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
LOCAL = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
"""Names of Transformer Engine -> those of the local modules."""


@dataclass(frozen=True)
class Grid:
    """Tensor- and pipeline-parallel ranks, and how many layers each stage has."""

    tensor: int
    layers: tuple[int, ...]

    @property
    def ranks(self) -> Iterator[tuple[int, int]]:
        """(tensor-parallel rank, stage)"""
        return product(range(self.tensor), range(len(self.layers)))


def megatron_rank(
    whole: State, grid: Grid, rank: int, stage: int, local: bool = False
) -> dict[str, Tensor]:
    """What the model's state dict holds on a rank, of a whole model under Megatron core's names;
    `local`: those of its local modules, in place of Transformer Engine's."""
    first, last = stage == 0, stage == len(grid.layers) - 1
    start = sum(grid.layers[:stage])
    held = {}
    for key, value in whole.items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)(\..*)", key)
        if match is not None:
            layer = int(match[1]) - start
            name = f"decoder.layers.{layer}{match[2]}" if 0 <= layer < grid.layers[stage] else ""
        else:
            name = key if (first if key.startswith("embedding.") else last) else ""
        if name:
            held[local_name(name) if local else name] = _rank_part(whole, key, value, grid, rank)
    if last and not first and "output_layer.weight" not in whole:  # tied: a copy of its own
        key = "embedding.word_embeddings.weight"
        held["output_layer.weight"] = _rank_part(whole, key, whole[key], grid, rank)
    return held


def local_name(key: str) -> str:
    for engine, local in LOCAL.items():
        key = key.replace(engine, local)
    return key


def _rank_part(whole: State, key: str, value: Tensor, grid: Grid, rank: int) -> Tensor:
    if key.endswith(FC1):
        fc2 = whole[f"{key.rpartition('linear_fc1')[0]}linear_fc2.weight"]
        sections = value.chunk(2 if len(value) == 2 * fc2.shape[1] else 1)
        return torch.cat([section.chunk(grid.tensor)[rank] for section in sections]).clone()
    dim = 0 if key.endswith(ROWS) else 1 if key.endswith(COLUMNS) else None
    return value.clone() if dim is None else value.chunk(grid.tensor, dim)[rank].clone()


def write_megatron(
    folder: Path, whole: State, grid: Grid, *, local: bool = False, **beside: Any
) -> Path:
    """An `iter_` directory as Megatron-LM's generate_state_dict fills it; `beside` goes into every
    file."""
    pipelined = len(grid.layers) > 1
    for rank, stage in grid.ranks:
        at = folder / (f"mp_rank_{rank:02d}_{stage:03d}" if pipelined else f"mp_rank_{rank:02d}")
        at.mkdir(parents=True)
        model = megatron_rank(whole, grid, rank, stage, local)
        extra = {f"decoder.layers.{n}.mlp.linear_fc1._extra_state": None for n in (0,)}
        state = {
            "args": megatron_args(grid, sum(grid.layers), rank + grid.tensor * stage),
            "checkpoint_version": 3.0,
            "iteration": 100,
            "model": OrderedDict({**model, **extra}),
            "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 3200},
            "rng_state": [
                {"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1,))}
            ],
            **beside,
        }
        torch.save(state, at / "model_optim_rng.pt")
    return folder


def megatron_args(grid: Grid, layers: int, rank: int = 0) -> Namespace:
    """Arguments as argparse leaves them: numbers, texts, and objects of classes."""
    return Namespace(
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=len(grid.layers),
        expert_model_parallel_size=1,
        rank=rank,
        num_layers=layers,
        swiglu=True,
        data_path=["one", "two"],
        params_dtype=torch.float32,
        model_type=HTTPStatus.OK,  # an enum
    )


def stacked(whole: State) -> dict[str, Tensor]:
    """As Megatron core's dist_checkpointing keys it: each tensor of the layers once, one on top of
    the other."""
    layers: dict[str, dict[int, Tensor]] = {}
    found = {}
    for key, value in whole.items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", key)
        if match is None:
            found[key] = value
        else:
            layers.setdefault(f"decoder.layers.{match[2]}", {})[int(match[1])] = value
    return found | {key: torch.stack([at[n] for n in sorted(at)]) for key, at in layers.items()}


def write_torch_dist(folder: Path, whole: State, **beside: Any) -> Path:
    """A directory of the format `torch_dist`, saved by torch; `beside` goes into common.pt."""
    from torch.distributed.checkpoint.state_dict_saver import save

    states = {f"decoder.layers.mlp.linear_fc1._extra_state/shard_{n}_2": [None] for n in (0, 1)}
    save({**stacked(whole), **states}, checkpoint_id=folder, no_dist=True)
    args = megatron_args(Grid(1, (2,)), 2)
    common = {"args": args, "iteration": 100, "checkpoint_version": 3.0, **beside}
    torch.save(common, folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))
    return folder
