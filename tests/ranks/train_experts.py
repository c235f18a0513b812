"""What each of 2 ranks does in `tests.operations.test_low_bit_releases`, by `run_ranks(module, 2, [DIR])`.

For each directory of DIR that holds `work`: loads it into an FSDP2 model of the config of `release`, trains the
one stack of experts and the norm for one step while the rest is frozen, and saves it as `trained`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import ckptmap
from tests.support.cpu_sharding import fully_shard


def train(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder / "release")
    del config.quantization_config
    last = f"model.layers.{config.num_hidden_layers - 1}.mlp.experts.gate_up_proj"
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="eager"
    )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ckptmap.load(folder / "work", model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in (last, "model.norm.weight"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=5.0)
    tokens = torch.arange(2, 6)[None] + dist.get_rank()  # few, so that some experts see none
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    ckptmap.save(folder / "trained", model).wait()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for given in sorted(Path(sys.argv[1]).glob("*/work")):
        train(given.parent)
    dist.destroy_process_group()
