"""Tiny models as GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them: names of the `gguf` package's own
table, metadata by its writer, and the published changes of values (rows of q and k, norms of 1 + w, experts)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

State = dict[str, torch.Tensor]
BASE: Mapping[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Model:
    """One model: the architecture's name in GGUF, and its config of transformers."""

    arch: MODEL_ARCH
    config: Mapping[str, Any]
    change: Callable[[str, torch.Tensor, Mapping[str, Any]], Iterator[tuple[str, torch.Tensor]]]
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Further keys of the metadata, and the config's key that each is taken from."""


def _same(
    name: str, w: torch.Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, w


def _rotary_rows(
    name: str, w: torch.Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    part = re.search(r"\.([qk])_proj\.", name)
    if part is None:
        yield name, w
        return
    heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
    yield name, w.view(heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def _norm_plus_one(
    name: str, w: torch.Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, w + 1 if name.endswith("norm.weight") else w


def _stacked(
    name: str, w: torch.Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers 5 has the experts of a layer in two tensors, GGUF in three."""
    stem = name.rpartition(".")[0]
    if name.endswith("experts.gate_up_proj"):
        gate, up = w.chunk(2, dim=1)
        yield f"{stem}.gate_proj.weight", gate
        yield f"{stem}.up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{stem}.down_proj.weight", w
    else:
        yield name, w[0] if name.endswith("shared_expert_gate.weight") else w


def _mixtral(
    name: str, w: torch.Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    for each, values in _stacked(name, w, config):
        yield from _rotary_rows(each, values, config)


def _gpt_oss(
    name: str, w: torch.Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`GptOssModel.modify_tensors`: gate and up lie side by side, and experts are transposed."""
    if ".experts." not in name:
        yield f"{name}.weight" if name.endswith("sinks") else name, w
        return
    stem, last = name.rpartition(".")[::2]
    kind = "bias" if last.endswith("_bias") else "weight"
    w = w if kind == "bias" else w.transpose(1, 2)
    if last.startswith("gate_up"):
        yield f"{stem}.gate_proj.{kind}", w[:, 0::2]
        yield f"{stem}.up_proj.{kind}", w[:, 1::2]
    else:
        yield f"{stem}.down_proj.{kind}", w


EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
GEMMA = {**BASE, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 32}
MODELS: Mapping[str, Model] = {
    "llama": Model(MODEL_ARCH.LLAMA, {**BASE, "model_type": "llama"}, _rotary_rows),
    "llama-tied": Model(
        MODEL_ARCH.LLAMA, {**BASE, "model_type": "llama", "tie_word_embeddings": True}, _rotary_rows
    ),
    "llama-bias": Model(
        MODEL_ARCH.LLAMA, {**BASE, "model_type": "llama", "attention_bias": True}, _rotary_rows
    ),
    "llama-biases": Model(
        MODEL_ARCH.LLAMA,
        {**BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True}, _rotary_rows,
    ),
    "qwen2": Model(MODEL_ARCH.QWEN2, {**BASE, "model_type": "qwen2"}, _same),
    "qwen3": Model(MODEL_ARCH.QWEN3, {**BASE, "head_dim": 128, "model_type": "qwen3"}, _same),
    "qwen3-biases": Model(
        MODEL_ARCH.QWEN3,
        {**BASE, "head_dim": 128, "attention_bias": True, "model_type": "qwen3"}, _same,
    ),
    "qwen2_moe": Model(
        MODEL_ARCH.QWEN2MOE,
        {**BASE, **MOE, "shared_expert_intermediate_size": 64, "model_type": "qwen2_moe"},
        _stacked,
        {**EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3_moe": Model(
        MODEL_ARCH.QWEN3MOE,
        {**BASE, **MOE, "norm_topk_prob": True, "model_type": "qwen3_moe"},
        _stacked,
        EXPERTS,
    ),
    "gemma2": Model(
        MODEL_ARCH.GEMMA2,
        {**GEMMA, "model_type": "gemma2"},
        _norm_plus_one,
        {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": Model(
        MODEL_ARCH.GEMMA3,
        {**GEMMA, "rope_theta": 1000000.0, "model_type": "gemma3_text"},
        _norm_plus_one,
    ),
    "gemma3-biases": Model(
        MODEL_ARCH.GEMMA3,
        {**GEMMA, "rope_theta": 1000000.0, "attention_bias": True, "model_type": "gemma3_text"},
        _norm_plus_one,
    ),
    "gemma": Model(MODEL_ARCH.GEMMA, {**BASE, "head_dim": 256, "model_type": "gemma"}, _norm_plus_one),
    "mixtral": Model(
        MODEL_ARCH.LLAMA,
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"},
        _mixtral,
        {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    "phi3": Model(
        MODEL_ARCH.PHI3, {k: v for k, v in BASE.items() if k != "head_dim"} | {"model_type": "phi3"}, _same
    ),
    "phi4": Model(
        MODEL_ARCH.PHI3,
        {k: v for k, v in BASE.items() if k != "head_dim"} | {"sliding_window": None, "model_type": "phi3"},
        _same,
    ),
    "gpt_oss": Model(
        MODEL_ARCH.GPT_OSS,
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
         "rope_theta": 150000.0, "model_type": "gpt_oss"},
        _gpt_oss,
        {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
         "expert_feed_forward_length": "intermediate_size"},
    ),
}  # fmt: skip


def build(model: Model) -> PreTrainedModel:
    """Return the model of transformers in fp32: random weights, norms and biases too."""
    settings = {key: value for key, value in model.config.items() if key != "model_type"}
    config = AutoConfig.for_model(model.config["model_type"], **settings)
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return made.eval()


def named(model: Model, built: PreTrainedModel) -> State:
    """Return the tensors by their names in GGUF, which the `gguf` package knows."""
    table = get_tensor_name_map(model.arch, model.config["num_hidden_layers"])
    found: State = {}
    for name, w in built.state_dict().items():
        if name == "lm_head.weight" and built.config.tie_word_embeddings:
            continue
        for each, values in model.change(name, w, built.config.to_dict()):
            theirs = table.get_name(each, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, each
            found[theirs] = values.contiguous()
    return found


def write_model(model: Model, built: PreTrainedModel, path: Path, kind: str = "F32") -> Path:
    """Write the model with matrices of this type where it fits, everything else as F32."""
    config = built.config.to_dict()
    writer = GGUFWriter(str(path), MODEL_ARCH_NAMES[model.arch])
    _add_metadata(writer, model, config)
    for name, w in named(model, built).items():
        values = w.numpy()
        chosen = GGMLQuantizationType[kind if w.ndim > 1 and "gate_inp" not in name else "F32"]
        if w.shape[-1] % GGML_QUANT_SIZES[chosen][0]:
            chosen = GGMLQuantizationType.F32
        writer.add_tensor(name, quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: GGUFWriter, model: Model, config: Mapping[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(model.config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    head = config.get("head_dim")
    if head is not None:
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(head)
    if "sliding_window" in model.config:
        writer.add_sliding_window(model.config["sliding_window"] or 0)
    if model.arch == MODEL_ARCH.GPT_OSS:
        writer.add_string("gpt-oss.rope.scaling.type", "yarn")
        writer.add_float32("gpt-oss.rope.scaling.factor", 32.0)
        writer.add_uint32("gpt-oss.rope.scaling.original_context_length", 4096)
    for key, named_key in model.numbers.items():
        value = model.config.get(named_key, config.get(named_key))
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{MODEL_ARCH_NAMES[model.arch]}.{key}", value)


def logits(model: PreTrainedModel) -> np.ndarray:
    tokens = torch.arange(3, 43).view(1, -1) % 96
    with torch.no_grad():
        found: np.ndarray = model(tokens).logits.float().numpy()
    return found
