"""Tiny models of every family that ships a mapping: extents all different, values all different.

An axis mix-up in a mapping then changes a shape, and a wrong permutation of equal axes changes
which ids stand where. 12 query heads share 4 key/value heads (3 each) of 10 numbers, so that a
split blind to grouped heads cannot fit; the hidden size over the heads is 5, not the
head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Shapes = Mapping[str, tuple[int, ...]]

_COMMON = {
    "vocab_size": 102,
    "hidden_size": 60,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Where a scheme or a model takes the head size to be hidden / heads.
_SQUARE = {**_COMMON, "hidden_size": 120}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 18}


@dataclass(frozen=True)
class Tiny:
    """One tiny model: `family` is its folder of mapping files, `config` what its config.json says."""

    name: str
    family: str
    config: Mapping[str, Any]
    disk_extra: Shapes = field(default_factory=dict)
    """Keys that published checkpoints have and the transformers model has not."""
    auto: str = "AutoModelForCausalLM"
    """transformers' class that finds the model of the config."""

    def build(self) -> PreTrainedModel:
        """The model in transformers, float32, with random weights."""
        import torch
        import transformers
        from transformers import AutoConfig

        config = AutoConfig.for_model(self.config["model_type"], **_without_type(self.config))
        torch.manual_seed(0)
        found = getattr(transformers, self.auto)
        model: PreTrainedModel = found.from_config(config, dtype=torch.float32)
        return model.eval()


def _without_type(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "model_type"}


def _drop(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def _deepseek_mtp(layer: int) -> Shapes:
    """The next-token layer of a published DeepSeek-V3, which transformers skips when it loads.

    Source: the key list of deepseek-ai/DeepSeek-V3, `model.layers.61.*`.
    """
    at = f"model.layers.{layer}."
    experts = {
        f"{at}mlp.experts.{e}.{name}_proj.weight": shape
        for e in range(7)
        for name, shape in (("gate", (18, 60)), ("up", (18, 60)), ("down", (60, 18)))
    }
    shared = {
        f"{at}mlp.shared_experts.{name}_proj.weight": shape
        for name, shape in (("gate", (36, 60)), ("up", (36, 60)), ("down", (60, 36)))
    }
    plain: dict[str, tuple[int, ...]] = {
        "eh_proj.weight": (60, 120),
        "embed_tokens.weight": (102, 60),
        "enorm.weight": (60,),
        "hnorm.weight": (60,),
        "input_layernorm.weight": (60,),
        "mlp.gate.e_score_correction_bias": (7,),
        "mlp.gate.weight": (7, 60),
        "post_attention_layernorm.weight": (60,),
        "self_attn.kv_a_layernorm.weight": (16,),
        "self_attn.kv_a_proj_with_mqa.weight": (20, 60),
        "self_attn.kv_b_proj.weight": (180, 16),
        "self_attn.o_proj.weight": (60, 108),
        "self_attn.q_a_layernorm.weight": (14,),
        "self_attn.q_a_proj.weight": (14, 60),
        "self_attn.q_b_proj.weight": (120, 14),
        "shared_head.head.weight": (102, 60),
        "shared_head.norm.weight": (60,),
    }
    return {**{at + key: shape for key, shape in plain.items()}, **experts, **shared}


_DEEPSEEK = {
    "model_type": "deepseek_v3",
    **_drop(_COMMON, "num_key_value_heads", "head_dim"),
    "num_hidden_layers": 3,
    "num_key_value_heads": 12,
    "q_lora_rank": 14,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 9,
    "n_routed_experts": 7,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    **_MOE,
}
_FALCON = {
    "model_type": "falcon",
    **_drop(_SQUARE, "num_key_value_heads", "head_dim", "intermediate_size"),
    "ffn_hidden_size": 56,
    "tie_word_embeddings": True,
}

TINY = {
    tiny.name: tiny
    for tiny in (
        Tiny("llama", "llama", {"model_type": "llama", **_SQUARE}),
        Tiny(
            "llama_tied",
            "llama",
            {"model_type": "llama", **_COMMON, "tie_word_embeddings": True},
        ),
        Tiny(
            "llama_bias",
            "llama",
            {"model_type": "llama", **_COMMON, "attention_bias": True, "mlp_bias": True},
        ),
        Tiny("mistral", "mistral", {"model_type": "mistral", **_COMMON, "sliding_window": 32}),
        Tiny("mistral_square", "mistral", {"model_type": "mistral", **_SQUARE}),
        Tiny("qwen2", "qwen2", {"model_type": "qwen2", **_drop(_SQUARE, "head_dim")}),
        Tiny(
            "qwen2_tied",
            "qwen2",
            {"model_type": "qwen2", **_drop(_SQUARE, "head_dim"), "tie_word_embeddings": True},
        ),
        Tiny("qwen3", "qwen3", {"model_type": "qwen3", **_COMMON}),
        Tiny(
            "qwen3_tied",
            "qwen3",
            {"model_type": "qwen3", **_COMMON, "tie_word_embeddings": True},
        ),
        Tiny("gemma", "gemma", {"model_type": "gemma", **_COMMON}),
        Tiny("gemma2", "gemma2", {"model_type": "gemma2", **_COMMON}),
        Tiny("gemma3_text", "gemma3_text", {"model_type": "gemma3_text", **_COMMON}),
        Tiny(
            "gemma3",
            "gemma3",
            {
                "model_type": "gemma3",
                "text_config": dict(_COMMON),
                "vision_config": {
                    "hidden_size": 24,
                    "intermediate_size": 34,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 2,
                    "num_channels": 5,
                    "image_size": 28,
                    "patch_size": 7,
                    "vision_use_head": True,
                },
                "mm_tokens_per_image": 4,
            },
        ),
        Tiny("phi3", "phi3", {"model_type": "phi3", **_drop(_SQUARE, "head_dim")}),
        Tiny(
            "gpt2",
            "gpt2",
            {
                "model_type": "gpt2",
                "vocab_size": 102,
                "n_embd": 120,
                "n_layer": 2,
                "n_head": 12,
                "n_positions": 64,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        Tiny(
            "gpt_neox",
            "gpt_neox",
            {
                "model_type": "gpt_neox",
                **_drop(_SQUARE, "num_key_value_heads", "head_dim"),
                "rotary_pct": 0.4,
            },
        ),
        Tiny(
            "gpt_neox_sequential",
            "gpt_neox",
            {
                "model_type": "gpt_neox",
                **_drop(_SQUARE, "num_key_value_heads", "head_dim"),
                "rotary_pct": 0.4,
                "use_parallel_residual": False,
            },
        ),
        Tiny(
            "falcon_new",
            "falcon",
            {
                **_FALCON,
                "new_decoder_architecture": True,
                "num_kv_heads": 4,
                "num_ln_in_parallel_attn": 2,
            },
        ),
        Tiny(
            "falcon_multi_query", "falcon", {**_FALCON, "multi_query": True, "parallel_attn": True}
        ),
        Tiny(
            "falcon_rw",
            "falcon",
            {
                **_FALCON,
                "multi_query": False,
                "parallel_attn": False,
                "alibi": True,
                "bias": True,
            },
        ),
        Tiny(
            "bloom",
            "bloom",
            {
                "model_type": "bloom",
                "vocab_size": 102,
                "hidden_size": 120,
                "n_layer": 2,
                "n_head": 12,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
            },
        ),
        Tiny(
            "mixtral",
            "mixtral",
            {
                "model_type": "mixtral",
                **_COMMON,
                "intermediate_size": 18,
                "num_local_experts": 7,
                "num_experts_per_tok": 2,
            },
        ),
        Tiny(
            "qwen2_moe",
            "qwen2_moe",
            {
                "model_type": "qwen2_moe",
                **_drop(_SQUARE, "head_dim"),
                **_MOE,
                "num_hidden_layers": 3,
                "num_experts": 7,
                "shared_expert_intermediate_size": 26,
                "mlp_only_layers": [1],
            },
        ),
        Tiny(
            "qwen3_moe",
            "qwen3_moe",
            {
                "model_type": "qwen3_moe",
                **_COMMON,
                **_MOE,
                "num_hidden_layers": 3,
                "num_experts": 7,
                "mlp_only_layers": [1],
            },
        ),
        Tiny(
            "llama4_text",
            "llama4_text",
            {
                "model_type": "llama4_text",
                **_COMMON,
                "intermediate_size": 18,
                "intermediate_size_mlp": 56,
                "num_hidden_layers": 3,
                "num_local_experts": 7,
                "moe_layers": [0, 2],
            },
        ),
        Tiny(
            "llama4",
            "llama4",
            {
                "model_type": "llama4",
                "text_config": {
                    **_COMMON,
                    "intermediate_size": 18,
                    "intermediate_size_mlp": 56,
                    "num_local_experts": 7,
                    "moe_layers": [0],
                },
                "vision_config": {
                    "hidden_size": 24,
                    "intermediate_size": 96,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 2,
                    "image_size": 28,
                    "patch_size": 7,
                    "vision_output_dim": 22,
                    "projector_input_dim": 26,
                    "projector_output_dim": 22,
                },
            },
            auto="AutoModelForImageTextToText",
        ),
        Tiny("deepseek_v3", "deepseek_v3", _DEEPSEEK),
        Tiny("deepseek_v3_no_q_lora", "deepseek_v3", {**_DEEPSEEK, "q_lora_rank": None}),
        Tiny(
            "deepseek_v3_mtp",
            "deepseek_v3",
            {**_DEEPSEEK, "num_nextn_predict_layers": 1},
            _deepseek_mtp(3),
        ),
        Tiny(
            "gpt_oss",
            "gpt_oss",
            {
                "model_type": "gpt_oss",
                **_COMMON,
                "intermediate_size": 18,
                "num_local_experts": 7,
                "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
            },
        ),
    )
}


def iota(shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """(key, float32 tensor) in key order; every number of the whole dict is another one.

    Ids below 2**24 are exact in float32, which holds for dicts of up to 16 million numbers.
    """
    import math

    import torch

    start = 0
    for key in sorted(shapes):
        numel = math.prod(shapes[key])
        ids = torch.arange(start, start + numel, dtype=torch.float32)
        yield key, ids.reshape(shapes[key])
        start += numel
    assert start < 2**24
