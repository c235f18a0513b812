"""What each of 2 ranks does in `tests.operations.test_low_bit_releases`, by `run_ranks(module, 2, [DIR])`.

For each directory of DIR that holds `work`: loads it into an FSDP2 model of the config of `release`, trains the
one stack of experts and the norm for one step while the rest is frozen, and saves it as `trained`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.ranks.train_two import main, step


def train(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder / "release")
    del config.quantization_config
    last = f"model.layers.{config.num_hidden_layers - 1}.mlp.experts.gate_up_proj"
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="eager"
    )
    few = torch.arange(2, 6)[None]  # so that some experts see none
    step(model, folder, (last, "model.norm.weight"), few)


if __name__ == "__main__":
    main(train)
