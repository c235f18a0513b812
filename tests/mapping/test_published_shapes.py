"""The shipped mapping files at the sizes of published models, from shapes alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ckptmap.errors import PlanError
from ckptmap.mapping.catalog import available
from ckptmap.mapping.detect import choose
from ckptmap.mapping.rules import HUB
from ckptmap.mapping.scheme_to_scheme import translate
from ckptmap.tensors import TensorInfo

# Sizes of each repository's config.json; the rest is transformers' default for the model type.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gemma-2-9b": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    # Its config says no more of the text than this.
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "phi-4": {
        "model_type": "phi3",
        "vocab_size": 100352,
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "pad_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt-neox-20b": {"model_type": "gpt_neox"},
    "RedPajama-INCITE-Base-3B-v1": {
        "model_type": "gpt_neox",
        "vocab_size": 50432,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "use_parallel_residual": False,
    },
    "falcon-7b": {"model_type": "falcon"},
    "falcon-40b": {
        "model_type": "falcon",
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "bloom-560m": {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "Mixtral-8x7B": {"model_type": "mixtral"},
}

REFUSED = {("gpt-neox-20b", "gpt_neox/megatron")}
"""What a scheme says it has no place for, with the reason in `test_errors_real_models.py`."""


@cache
def published(name: str) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """(shapes by the hub's names, config) of one model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    asked = dict(PUBLISHED[name])
    config = AutoConfig.for_model(asked.pop("model_type"), **asked)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    memory = {
        key: TensorInfo(tuple(tensor.shape), "bfloat16")
        for key, tensor in model.state_dict().items()
        if key not in model.all_tied_weights_keys
    }
    fused = [e for e in available() if e.name == "hf-memory" and config.model_type in e.models]
    if not fused:
        return memory, config.to_dict()
    found = translate(memory, fused[-1].load(), None, config.to_dict())
    return {key: made.info for key, made in found.targets.items()}, config.to_dict()


def test_families_that_are_shipped_are_here() -> None:
    """But those of many experts a layer, which take longer than they tell."""
    many = {"qwen2_moe", "qwen3_moe", "deepseek_v3", "gemma3_text", "llama4", "llama4_text"}
    types = {sizes["model_type"] for sizes in PUBLISHED.values()}
    assert {e.family for e in available() if not types.intersection(e.models)} == many


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_scheme_there_and_back(name: str) -> None:
    hub, config = published(name)
    assert choose(hub, HUB, None, config).source is not None
    schemes = [e for e in available() if config["model_type"] in e.models and e.name != HUB]
    for entry in schemes:
        scheme = entry.load()
        if (name, entry.title) in REFUSED:
            with pytest.raises(PlanError, match="from the same input"):
                translate(hub, None, scheme, config)
            continue
        there = translate(hub, None, scheme, config)
        assert not there.unmapped
        made = {key: m.info for key, m in there.targets.items() if key not in there.tied}
        back = translate(made, scheme, None, config)
        assert not back.unmapped
        infos = {key: m.info for key, m in back.targets.items()}
        # An op that states a dtype (GGUF's norms are float32) leaves no trace of the hub's.
        stated = {key: m.stated_dtype for key, m in back.targets.items() if m.stated_dtype}
        wanted = {k: TensorInfo(i.shape, stated.get(k, i.dtype)) for k, i in hub.items()}
        assert wanted.items() <= infos.items()
        assert set(stated.values()) <= ({"float32"} if entry.name == "gguf" else set())
        assert infos.keys() - hub.keys() <= {"lm_head.weight", "language_model.lm_head.weight"}
