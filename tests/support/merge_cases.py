"""Tiny models with adapters that peft makes and saves, untrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

LINEARS = ["q_proj", "up_proj", "down_proj"]
CONV1D = ["c_attn", "c_proj", "c_fc"]


def llama(dtype: torch.dtype = torch.float32, hidden: int = 64, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300, hidden_size=hidden, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **{"tie_word_embeddings": False} | more,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def gpt2(dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype).eval()


def adapted(model: Any, size: float = 0.05, **config: Any) -> Any:
    """The model with an adapter of values that are not the zeros it begins with."""
    wrapped = get_peft_model(model, LoraConfig(**{"r": 8, "lora_alpha": 16} | config))
    maker = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=maker) * size
                parameter.add_(noise.to(parameter.dtype))
    return wrapped.eval()


def saved(folder: Path, model: Any, size: float = 0.05, **config: Any) -> Any:
    """`folder/base` as transformers saves it, `folder/adapter` as peft does; the model of both."""
    model.save_pretrained(folder / "base")
    wrapped = adapted(model, size, **config)
    save_adapter(wrapped, folder / "adapter")
    return wrapped


def save_adapter(wrapped: Any, folder: Path) -> None:
    """As peft saves it, but for the model card: rendering it takes longer than all the rest."""
    with patch.object(PeftModel, "create_or_update_model_card"):
        wrapped.save_pretrained(str(folder))


def merged_by_peft(wrapped: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = wrapped.merge_and_unload().state_dict()
    return found
