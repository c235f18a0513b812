"""Packed integers as an older compressed-tensors writes them, with what it decodes them to.

    python make_compressed.py     with compressed-tensors 0.8.1, then 0.12.2, and torch

Up to 0.17 no code lies in two words, and up to 0.9.2 zero points are not packed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    fake_quantize,
)
from safetensors.torch import save_file
from torch import nn

WIDTH, GROUP, FORM = 64, 16, "pack-quantized"
HERE = Path(__file__).parent / compressed_tensors.__version__
LAYERS: dict[str, dict[str, Any]] = {
    "three": {"num_bits": 3, "strategy": "channel"},
    "five": {"num_bits": 5, "strategy": "group", "group_size": GROUP},
    "six": {"num_bits": 6, "strategy": "channel"},
    "seven": {"num_bits": 7, "strategy": "group", "group_size": GROUP},
    "eight": {"num_bits": 8, "strategy": "channel"},
    "four_asymmetric": {
        "num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False,
    },
    "tensor_asymmetric": {"num_bits": 4, "strategy": "tensor", "symmetric": False},
}  # fmt: skip


def scales(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the largest and least of each block, plainly; what they are does not matter here."""
    strategy = str(getattr(args.strategy, "value", args.strategy))
    width = {"channel": WIDTH, "group": GROUP, "tensor": weight.numel()}[strategy]
    blocks = weight.float().reshape(-1, width)
    high, low = blocks.amax(1).clamp(min=0), blocks.amin(1).clamp(max=0)
    scale = (high - low) / (2**args.num_bits - 1)
    zero = torch.round(-(2 ** (args.num_bits - 1)) - low / scale)
    shape = (1,) if strategy == "tensor" else (len(weight), -1)
    zero = torch.zeros_like(zero) if args.symmetric else zero
    return scale.reshape(shape).to(weight.dtype), zero.reshape(shape).to(torch.int8)


def main() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(WIDTH, 8, bias=False) for name in LAYERS}).bfloat16()
    groups = {
        f"group_{number}": QuantizationScheme(
            targets=[f"re:.*{name}$"], weights=QuantizationArgs(**args)
        )
        for number, (name, args) in enumerate(LAYERS.items())
    }
    config = QuantizationConfig(config_groups=groups, quantization_status="frozen", format=FORM)
    apply_quantization_config(model, config)
    truth = {}
    for name, layer in model.items():
        args = layer.quantization_scheme.weights
        scale, zero = scales(layer.weight.data, args)
        layer.weight_scale.data = scale
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data = zero
        truth[f"{name}.weight"] = fake_quantize(
            layer.weight.data, scale, None if args.symmetric else zero, args
        )
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=FORM)
    HERE.mkdir(exist_ok=True)
    state = {key: value.contiguous() for key, value in compressor.compress(model).items()}
    save_file(state, HERE / "model.safetensors", {"format": "pt"})
    save_file(truth, HERE / "truth.safetensors")
    (HERE / "config.json").write_text("{}")
    compressor.update_config(str(HERE))
    said = json.loads((HERE / "config.json").read_text())
    (HERE / "config.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
