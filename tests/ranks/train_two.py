"""What each of 2 ranks does in `tests.operations.test_as`, by `run_ranks("tests.ranks.train_two", 2, [DIR])`.

For each directory of DIR that holds `work`: loads it into an FSDP2 model of the config beside it, trains
two weights for one step, saves it as `trained`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import ckptmap
from tests.support.cpu_sharding import fully_shard

TRAINED = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight")


def train(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder / "release")
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    step(model, folder, TRAINED, torch.arange(12)[None])


def step(
    model: torch.nn.Module, folder: Path, trained: Collection[str], tokens: torch.Tensor
) -> None:
    """Load `work` into the model, train these weights for one step, and save it as `trained`.

    tokens  int64 [1, n], to which each rank adds its number
    """
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ckptmap.load(folder / "work", model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=5.0)
    mine = tokens + dist.get_rank()
    model(input_ids=mine, labels=mine).loss.backward()
    optimizer.step()
    ckptmap.save(folder / "trained", model).wait()


def main(train: Callable[[Path], None]) -> None:
    """Train what each directory of the command line's holds as `work`."""
    dist.init_process_group("gloo")
    for given in sorted(Path(sys.argv[1]).glob("*/work")):
        train(given.parent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(train)
