"""Writes what is beside this file: a tiny Llama as ModelOpt 0.47 exported it in several forms, and digests of its values.

    pip install --target EXTRAS --no-deps nvidia-modelopt==0.47 omegaconf antlr4-python3-runtime==4.9.3 datasets pyarrow \\
        pandas python-dateutil six multiprocess dill xxhash nvidia-ml-py pulp scipy pydantic pydantic-core annotated-types \\
        typing-inspection rich
    PYTHONPATH=EXTRAS python tests/golden/modelopt/make_modelopt.py

It ran on the CPU. The digests are SHA-256 of bfloat16 values: those of ModelOpt's own `FP8QTensor` and `INT8QTensor`,
dequantized to fp32, and for int4, which it only packs, those of its formula; each times `pre_quant_scale`. They are
within a rounding of the values that ModelOpt computes with, which the maker asserts by the logits of the model.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
FORMS = {
    "fp8-rows": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8-tiles": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int8-smooth": "INT8_SMOOTHQUANT_CFG",
    "int4-awq": "INT4_AWQ_CFG",
    "w4a8-awq": "W4A8_AWQ_BETA_CFG",
}
SIDE = 32
IDS = torch.arange(32).view(2, 16) % 16


def model_of() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    return LlamaForCausalLM(config).bfloat16().eval()


def smaller_blocks(config: Any) -> None:
    """Set the sides of all blocks to 32, so that a small model has several."""
    for value in config.values() if isinstance(config, dict) else config:
        if isinstance(value, dict) and "block_sizes" in value and value["block_sizes"]:
            sizes = value["block_sizes"]
            sizes.update({dim: SIDE for dim in sizes if isinstance(dim, int)})
        if isinstance(value, dict | list):
            smaller_blocks(value)


def values_of(path: Path) -> dict[str, torch.Tensor]:
    qtensor: Any = importlib.import_module("modelopt.torch.quantization.qtensor")
    stored, values = load_file(path / "model.safetensors"), {}
    for key, codes in stored.items():
        scale = stored.get(f"{key}_scale")
        if scale is None:
            continue
        if codes.dtype == torch.float8_e4m3fn:
            made = qtensor.FP8QTensor(codes.shape, torch.bfloat16, codes)
            tiles = {"block_sizes": {-1: SIDE, -2: SIDE}} if scale.dim() == 4 else {}
            scale = scale.squeeze(3).squeeze(1) if tiles else scale[:, None]
            wide = made.dequantize(torch.float32, scale=scale, **tiles)
        elif codes.dtype == torch.int8:
            made = qtensor.INT8QTensor(codes.shape, torch.bfloat16, codes)
            wide = made.dequantize(torch.float32, scale=scale[:, None])
        else:
            pairs = torch.stack([codes & 15, codes >> 4], 1).flatten(0, 1).to(torch.int16)
            wide = torch.where(pairs > 7, pairs - 16, pairs) * scale.repeat_interleave(SIDE, 1)
        smoothing = stored.get(f"{key.removesuffix('weight')}pre_quant_scale")
        values[key] = (wide if smoothing is None else wide * smoothing.float()).bfloat16()
    return values


def main() -> None:
    quantization: Any = importlib.import_module("modelopt.torch.quantization")
    export: Any = importlib.import_module("modelopt.torch.export")
    truth = {}
    for name, wanted in FORMS.items():
        config = copy.deepcopy(getattr(quantization, wanted))
        smaller_blocks(config)
        model = quantization.quantize(model_of(), config, lambda model: model(IDS))
        logits = model(IDS).logits.float()
        export.export_hf_checkpoint(model, export_dir=HERE / name)
        values = values_of(HERE / name)
        truth[name] = {
            key: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for key, value in values.items()
        }
        dense = model_of()
        dense.load_state_dict(load_file(HERE / name / "model.safetensors") | values, strict=False)
        difference = float((dense(IDS).logits.float() - logits).norm() / logits.norm())
        print(name, len(values), difference)
        for file in (HERE / name).iterdir():
            if file.name not in ("config.json", "hf_quant_config.json", "model.safetensors"):
                file.unlink()
    (HERE / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
