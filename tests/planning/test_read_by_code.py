"""Layers whose weight the model's own code reads stay dense: transformers loads the rest in codes, and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptmap
from ckptmap.planning import read_by_code

IDS = torch.arange(3, 19)[None]
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WAVES = {
    "conv_dim": (64, 64),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
}
LAYOUT = {
    "input_size": 32, "patch_size": 16, "max_position_embeddings": 64, "coordinate_size": 12, "shape_size": 8,
    "max_2d_position_embeddings": 64, "rel_pos_bins": 64, "rel_2d_pos_bins": 64,
}  # fmt: skip


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": IDS}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_values": torch.linspace(-1, 1, 400)[None]}


def _page() -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "bbox": torch.ones(1, 16, 4, dtype=torch.int64)}


VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
BLIP = {
    "vision_config": VISION, "qformer_config": {**SIZES, "encoder_hidden_size": 64}, "num_query_tokens": 4,
    "text_config": {"model_type": "opt", **SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}, "image_token_index": 95,
}  # fmt: skip
TROCR = {
    "encoder": {"model_type": "vit", **VISION},
    "decoder": {
        "model_type": "trocr", "vocab_size": 96, "d_model": 64, "decoder_layers": 1, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 128, "cross_attention_hidden_size": 64, "is_decoder": True, "add_cross_attention": True,
    },
}  # fmt: skip
SHARED = {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 8,
    "mamba_headdim": 16, "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 64, "use_mem_rope": False,
    "hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
}  # fmt: skip


GEMMA = {
    "text_config": {
        **SIZES, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "num_global_key_value_heads": 2,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "max_position_embeddings": 64,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip


def _canvas() -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}


def _image() -> dict[str, torch.Tensor]:
    ids = torch.cat([torch.full((1, 4), 95), IDS], 1)
    return {"input_ids": ids, "pixel_values": torch.linspace(-1, 1, 768).view(1, 3, 16, 16)}


def _line() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.linspace(-1, 1, 768).view(1, 3, 16, 16), "decoder_input_ids": IDS}


Made = tuple[str, str, Mapping[str, Any], Callable[[], dict[str, torch.Tensor]], str]
MODELS: Mapping[str, Made] = {
    "mamba": ("MambaForCausalLM", "mamba", {"time_step_rank": 64, "state_size": 64}, _text, "mixer.dt_proj"),
    "rwkv": ("RwkvForCausalLM", "rwkv", {"attention_hidden_size": 64, "num_hidden_layers": 2}, _text, ""),
    "wavlm": ("WavLMForCTC", "wavlm", {**WAVES, "num_conv_pos_embedding_groups": 4}, _sound, "attention.q_proj"),
    "mobilebert": (
        "MobileBertForMaskedLM", "mobilebert",
        {"embedding_size": 32, "intra_bottleneck_size": 64, "true_hidden_size": 64}, _text, "predictions.dense",
    ),
    "layoutlmv3": ("LayoutLMv3Model", "layoutlmv3", LAYOUT, _page, "rel_pos_bias"),
    "zamba2": ("Zamba2ForCausalLM", "zamba2", SHARED, _text, "shared_transformer.self_attn.q_proj"),
    "diffusion_gemma": (
        "DiffusionGemmaForBlockDiffusion", "diffusion_gemma", GEMMA, _canvas, "decoder.layers.0.self_attn.q_proj",
    ),
    "blip-2": ("Blip2ForConditionalGeneration", "blip-2", BLIP, _image, ""),
    "trocr": ("VisionEncoderDecoderModel", "vision-encoder-decoder", TROCR, _line, ""),
}  # fmt: skip
"""The class, `model_type`, sizes, inputs, and a layer that bitsandbytes must leave."""


def saved(kind: str, path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    made, model_type, sizes, inputs, _ = MODELS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    getattr(transformers, made)(config).to(torch.bfloat16).save_pretrained(path)
    return getattr(transformers, made), inputs()


def computed(made: Any, path: Path, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    model, told = made.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(told.values()), told
    for module in model.modules():
        # bitsandbytes would pack the weights anew, and not those of few rows.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        return torch.as_tensor(model.eval()(**inputs)[0]).float()


CASES = [(kind, form) for kind in list(MODELS)[:5] for form in ("bnb-nf4", "int8")]
TIED = [
    ("zamba2", "bnb-int8"),
    ("zamba2", "ct-int8"),
    ("diffusion_gemma", "bnb-nf4"),
    ("diffusion_gemma", "bnb-int8"),
    ("diffusion_gemma", "ct-fp8"),
    ("blip-2", "ct-int8"),
    ("trocr", "ct-int8"),
    ("trocr", "bnb-nf4"),
]
"""Layers without a weight in the file must be named as dense, too: they would be looked for in codes."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), CASES + TIED)
def test_the_model_computes(kind: str, form: str, tmp_path: Path) -> None:
    made, inputs = saved(kind, tmp_path / "in")
    report = ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{form}")
    assert report.fidelity["quantize"], report.fidelity
    dense, got = (computed(made, tmp_path / name, inputs) for name in ("in", "out"))
    assert (got - dense).norm() < dense.norm(), "the codes are not those of the values"
    left = MODELS[kind][-1]
    with ckptmap.open(tmp_path / "out") as ckpt:
        kept = [fqn for fqn in ckpt if left and fqn.endswith(f".{left}.weight")]
        assert all(ckpt[fqn].encoding == "dense" for fqn in kept) and bool(kept) is bool(left)


def test_what_is_named_is_encoded(tmp_path: Path) -> None:
    """--encode asks for the weight, whatever reads it."""
    saved("mamba", tmp_path / "in")
    plan = ckptmap.plan(tmp_path / "in", "full-bnb-nf4", encode=("*.dt_proj.weight",))
    assert plan.fidelities()["quantize"] == 1


def test_every_line_of_the_table_is_of_a_model() -> None:
    assert set(read_by_code._table()) <= set(transformers.CONFIG_MAPPING)
