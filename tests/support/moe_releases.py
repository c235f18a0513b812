"""Small models with experts in the low-bit forms in which large ones are released."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

FILE = "model.safetensors"
SIZES = dict(
    vocab_size=96, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
    n_routed_experts=4, kv_lora_rank=128, q_lora_rank=128, qk_rope_head_dim=32, v_head_dim=32,
    qk_nope_head_dim=32, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
LEFT = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"]
"""What Kimi-K2 leaves dense: all but the routed experts."""


def _dense(path: Path) -> dict[str, torch.Tensor]:
    """Save a DeepSeek-V3 as transformers does, and return what it wrote."""
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(path)
    return load_file(path / FILE)


def _finish(path: Path, tensors: dict[str, torch.Tensor], quantization: object) -> None:
    save_file(tensors, path / FILE, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))


def kimi(path: Path) -> None:
    """Kimi-K2's form: routed experts as compressed-tensors packs them, int4 in groups of 32."""
    tensors = _dense(path)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.load_from_registry("pack-quantized")
    for key in [key for key in tensors if ".mlp.experts." in key]:
        stem, weight = key.removesuffix("weight"), tensors.pop(key)
        groups = weight.view(weight.shape[0], -1, 32)
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        packed = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        tensors |= {f"{stem}{name}": value.contiguous() for name, value in packed.items()}
    stated: Any = args.model_dump()
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": LEFT,
        "quantization_status": "compressed", "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": stated}},
    }  # fmt: skip
    _finish(path, tensors, quantization)


def deepseek(path: Path) -> None:
    """DeepSeek-V3's form: transformers' own tiles of 128 x 128 wherever whole tiles cover a weight."""

    class Quantizer:
        class quantization_config:
            weight_block_size = (128, 128)
            scale_fmt = "float"

    tensors = _dense(path)
    left = []
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        if any(n % 128 for n in tensors[key].shape):
            left.append(key.removesuffix(".weight"))
            continue
        tensors |= Fp8Quantize(Quantizer()).convert({key: tensors.pop(key)})
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *left],
    }  # fmt: skip
    _finish(path, tensors, quantization)
