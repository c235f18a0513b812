"""LoRA under FSDP2, saved by torch.distributed.checkpoint as it comes: dense, and over bnb NF4."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.support.bnb_cases import Layers, linear4bit, weight
from tests.support.cpu_sharding import fully_shard
from tests.support.merge_cases import LINEARS, adapted, llama, merged_by_peft


def dense(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config: dict[str, Any] = {"target_modules": LINEARS, "modules_to_save": ["lm_head"]}
    if dist.get_rank() == 0:
        llama().save_pretrained(folder / "base")
        adapted(llama(), **config).save_pretrained(str(folder / "peft"))
        save_file(merged_by_peft(adapted(llama(), **config)), folder / "truth.safetensors")
    model = adapted(llama(), **config)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trainable = StateDictOptions(ignore_frozen_params=True)
    small = get_model_state_dict(model, options=trainable)
    dcp.save({"model": small}, checkpoint_id=folder / "trainable")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "all")


def quantized(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = Layers({
        "up": linear4bit(weight((64, 128), torch.bfloat16, 1), "nf4", True, 64, torch.bfloat16),
        "down": linear4bit(weight((128, 64), torch.bfloat16, 2), "nf4", True, 64, torch.bfloat16),
    }).to(torch.bfloat16)  # fmt: skip
    if dist.get_rank() == 0:
        save_file(layers.state_dict(), folder / "nf4.safetensors")
    dist.barrier()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["up", "down"])
    model = get_peft_model(layers, config, autocast_adapter_dtype=False)
    maker = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            noise = torch.randn(parameter.shape, generator=maker)
            parameter.data = (noise * 0.1).to(torch.bfloat16)
    if dist.get_rank() == 0:
        model.save_pretrained(str(folder / "nf4-peft"))
    fully_shard(model, mesh=mesh)
    dcp.save(model.state_dict(), checkpoint_id=folder / "nf4-all")


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    dense(folder)
    dist.barrier()
    quantized(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
