"""Load what ckptmap wrote for `fsdp1-local` into live FSDP1 models: `python -m ... --jobs FILE`.

A job is {path, truth, wrap, orig, recipe}: rank files, the state dict they must be, and how the
model that loads them is made. Each is loaded under LOCAL_STATE_DICT; then FSDP1's own full
state dict must be the truth, and what it saves itself must be what was loaded, padding included.
"""

from __future__ import annotations

import argparse
import json
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.corpus.models import Attention, Layer, Mlp, Recipe, Tiny, tiny_llama
from tests.corpus.writers_fsdp1 import full_type
from tests.corpus.writers_fsdp1_local import local_state

WRAPS: dict[str, set[type[torch.nn.Module]]] = {
    "layers": {Layer},
    "nested": {Layer, Attention, Mlp},
    "root": set(),
}


def wraps(name: str) -> set[type[torch.nn.Module]]:
    if name == "llama":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        return {LlamaDecoderLayer}
    return WRAPS[name]


def shards(value: Tensor) -> list[Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor.detach() for shard in value.local_shards()]
    return [value.detach()]


def check(job: dict[str, Any], rank: int, world: int) -> None:
    recipe = Recipe(tied=job["tied"], dtype=getattr(torch, job["dtype"]))
    model = FSDP(
        tiny_llama(seed=7) if job["llama"] else Tiny(recipe),
        device_id=torch.device("cpu"),
        use_orig_params=job["orig"],
        auto_wrap_policy=ModuleWrapPolicy(wraps(job["wrap"])),
    )
    own = local_state(model)
    file = Path(job["path"]) / f"model_world_size_{world}_rank_{rank}.pt"
    found: dict[str, Tensor] = torch.load(file, weights_only=False)
    assert set(found) == set(own), set(found) ^ set(own)
    kept = {name: [part.clone() for part in shards(value)] for name, value in found.items()}
    for name, value in found.items():
        if isinstance(value, ShardedTensor):
            assert isinstance(own[name], ShardedTensor)
            assert value.metadata() == own[name].metadata(), name
            assert value.sharding_spec() == own[name].sharding_spec(), name
    # torch 2.13 with use_orig_params=True takes no file strictly, its own neither: it has no
    # parameter called _flat_param then, and loads the slices by name.
    done = model.load_state_dict(found, strict=not job["orig"])
    flat = [name for name in found if name.endswith("_flat_param")] if job["orig"] else []
    assert not done.missing_keys and sorted(done.unexpected_keys) == sorted(flat)
    for name, value in local_state(model).items():
        for one, two in zip(shards(value), kept[name], strict=True):
            assert torch.equal(one, two), f"{name}: saved again, it is not what was loaded"
    full_type(model)
    truth = torch.load(job["truth"], weights_only=True)
    state = model.state_dict()
    assert set(state) == set(truth)
    for name, value in truth.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # FSDP1's own deprecations
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    for job in json.loads(options.jobs.read_text()):
        check(job, rank, world)
        print(f"loaded {job['name']}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
