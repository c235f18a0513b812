"""A small gpt-oss with MXFP4 experts. Its writer needs a GPU, so its bytes are random: the names, shapes and
config are those of openai/gpt-oss-20b, and transformers loads it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ckptmap.quantization.microscaling.gpt_oss import KEPT, STACKED

Tensors = dict[str, torch.Tensor]
GATE = "model.layers.0.mlp.experts.gate_up_proj"
SIZES = dict(
    num_hidden_layers=1, num_local_experts=4, vocab_size=96, hidden_size=64, intermediate_size=96,
    head_dim=16, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    layer_types=["sliding_attention"],
)  # fmt: skip


@cache
def _dense() -> tuple[Tensors, str]:
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SIZES)).to(torch.bfloat16)
    return {k: v.clone() for k, v in model.state_dict().items()}, model.config.to_json_string()


@cache
def quantized(low: int = 112, high: int = 128) -> tuple[Tensors, Tensors]:
    """Stored tensors and what transformers decodes; exponents are from `low` to below `high`."""
    torch.manual_seed(1)
    stored, truth = dict(_dense()[0]), dict(_dense()[0])
    for name, weight in _dense()[0].items():
        if name.endswith(STACKED):
            experts, height, width = weight.shape
            grid = experts, width, height // 32
            blocks = torch.randint(0, 256, (*grid, 16), dtype=torch.uint8)
            scales = torch.randint(low, high, grid, dtype=torch.uint8)
            blocks[0, 0], scales[0, 0] = 0, 0  # a block of zeros
            blocks[0, 1] = 0xF7  # a saturated one
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            truth[name] = convert_moe_packed_tensors(blocks, scales)
    return stored, truth


def write(path: Path, tensors: Tensors | None = None, quantization: object = None) -> Path:
    """Write a directory as openai/gpt-oss-20b, with other tensors or config where given."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        quantized()[0] if tensors is None else tensors, path / "model.safetensors", {"format": "pt"}
    )
    config = json.loads(_dense()[1])
    config["quantization_config"] = quantization or {
        "quant_method": "mxfp4", "modules_to_not_convert": list(KEPT),
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def written(path: Path) -> Tensors:
    """The tensors of the only file of a directory."""
    (file,) = path.glob("*.safetensors")
    return load_file(file)


def logits(path: Path) -> torch.Tensor:
    """What the model computes that transformers loads, decoded."""
    model = GptOssForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        computed: torch.Tensor = model(torch.arange(2, 20)[None]).logits
    return computed
