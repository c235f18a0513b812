"""Make the config.json of a model from the metadata of its GGUF file.

    llama.embedding_length = 4096                       ->  "hidden_size": 4096
    llama.attention.layer_norm_rms_epsilon = f32 1e-5   ->  "rms_norm_eps": 1e-05
    no tensor output.weight                             ->  "tie_word_embeddings": true

Keys: ggml's docs/gguf.md and gguf-py/gguf/constants.py. What llama.cpp knows by the architecture and does not
write (the scale of Gemma's queries, the routing of Qwen's experts) is that of its src/llama-model.cpp.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from ckptmap.formats.gguf.header import GgufHeader
from ckptmap.formats.gguf.rope_factors import rope_scaling

Config: TypeAlias = dict[str, object]
SIZES: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
}
WINDOW = "sliding_window"
"""0 of it is no window in llama.cpp, as Phi-4 states it, and one of no token in transformers."""
NEEDED = ("embedding_length", "block_count", "attention.head_count")
"""Without these, a file describes no model: a part of one, a vocabulary, an adapter."""
LACKED = ("feed_forward_length", "context_length", "attention.layer_norm_rms_epsilon")
"""What llama.cpp writes for each of these models besides."""
TOKENS: Mapping[str, str] = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "padding": "pad_token_id",
}
EXPERTS: Mapping[str, str] = {
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
YARN: Mapping[str, str] = {
    "yarn_ext_factor": "extrapolation_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Key after `rope.scaling.` -> key of a rope_scaling of type yarn."""
LOCAL_BASE: Mapping[str, str] = {"rope.freq_base_swa": "rope_local_base_freq"}
"""Base of the rotary frequencies of layers that slide a window, where it is another one: Gemma 3."""
SOFTCAPS: Mapping[str, str] = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


@dataclass(frozen=True)
class Architecture:
    """A model of transformers: its type, class, the keys of its own, and what the metadata leave out."""

    model_type: str
    model: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Callable[[GgufHeader, Config], Mapping[str, object]] = lambda header, config: {}


def config_of(header: GgufHeader) -> Config | None:
    """Return the config; None where the architecture is not known here, its sizes are not stated, or layers differ."""
    name = header.text("general.architecture")
    known = MIXTRAL if _is_mixtral(header, name) else ARCHITECTURES.get(name)
    if known is None or any(header.count(f"{name}.{key}") is None for key in NEEDED):
        return None
    config: Config = {"architectures": [known.model], "model_type": known.model_type}
    for key, named in {**SIZES, **known.keys}.items():
        value = header.metadata.get(f"{name}.{key}")
        if isinstance(value, tuple):  # one number a layer
            if len(set(value)) != 1:
                return None
            value = value[0]
        if isinstance(value, int | float):
            config[named] = shortest(value) if value or named != WINDOW else None
    names = {tensor.name: tensor for tensor in header.tensors}
    rows = _vocabulary(header)
    config |= {
        named: token for named, token in _tokens(header).items() if token < (rows or token + 1)
    }
    if rows is not None:
        config["vocab_size"] = rows
    config["tie_word_embeddings"] = "output.weight" not in names
    theta = config.get("rope_theta", 10000.0)
    scaling, _ = rope_scaling(header.factors, theta if isinstance(theta, float) else 10000.0)
    scaling = scaling or _rope_scaling(header, name)
    if scaling is not None:
        config["rope_scaling"] = scaling
    config |= known.fixed(header, config)
    return {**config, "torch_dtype": "float32"}


def unmapped(header: GgufHeader) -> str:
    """Return the architecture, where it is none of those that mapping files are for; "" otherwise, and for a file that
    states none."""
    name = header.text("general.architecture")
    return "" if name in ARCHITECTURES else name


def untold(header: GgufHeader) -> list[str]:
    """Return notes on what the file holds and a config.json made of it does not say."""
    rows = _vocabulary(header)
    beyond = [
        f"{named} {token}: is no token of the {rows} that the embedding has rows for, and is left out of a config.json"
        " made of this file: transformers cannot load a model with it"
        for named, token in _tokens(header).items()
        if rows is not None and token >= rows
    ]
    theta = header.metadata.get(f"{header.text('general.architecture')}.rope.freq_base", 10000.0)
    _, tensor = rope_scaling(header.factors, theta if isinstance(theta, float) else 10000.0)
    told = [*_unstated(header), *beyond]
    if not tensor:
        return told
    return [
        *told,
        f"{tensor}: its factors of rotary frequencies are of no rope_scaling that is known, and a config.json made"
        " of this file has none: give the model's own with --config-from PATH",
    ]


def _unstated(header: GgufHeader) -> list[str]:
    """Return a note on sizes that are missing, for which transformers takes those of another model of the family."""
    name = header.text("general.architecture")
    if name not in ARCHITECTURES or any(header.count(f"{name}.{key}") is None for key in NEEDED):
        return []
    lacking = [key for key in LACKED if f"{name}.{key}" not in header.metadata]
    if not lacking:
        return []
    return [
        f"the metadata state no {', '.join(f'{name}.{key}' for key in lacking)}, and a config.json made of this file no"
        f" {', '.join(map(SIZES.__getitem__, lacking))}: transformers takes its defaults; give the model's own with"
        " --config-from PATH"
    ]


def _vocabulary(header: GgufHeader) -> int | None:
    """Return how many rows the embedding has; None where the file holds none."""
    shapes = (tensor.shape for tensor in header.tensors if tensor.name == "token_embd.weight")
    return next((shape[0] for shape in shapes if shape), None)


def made_files(header: GgufHeader) -> dict[str, bytes]:
    """Return the files that lie beside the weights of a Hugging Face model, by name."""
    config = config_of(header)
    return {} if config is None else {"config.json": (json.dumps(config, indent=2) + "\n").encode()}


def shortest(value: int | float) -> int | float:
    """Return the shortest number that is the same in fp32, in which GGUF states numbers: 1e-05."""
    if not isinstance(value, float):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except OverflowError:  # it is no fp32
            return value
    return value


def _tokens(header: GgufHeader) -> dict[str, int]:
    found = {named: header.count(f"tokenizer.ggml.{key}_token_id") for key, named in TOKENS.items()}
    return {named: token for named, token in found.items() if token is not None}


def _rope_scaling(header: GgufHeader, name: str) -> Config | None:
    """Return how positions are scaled; None where they are not, or the metadata do not say it."""
    kind = header.text(f"{name}.rope.scaling.type")
    factor = header.metadata.get(f"{name}.rope.scaling.factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, float):
        return None
    scaling: Config = {"rope_type": kind, "factor": shortest(factor)}
    before = header.count(f"{name}.rope.scaling.original_context_length")
    if before is not None:
        scaling["original_max_position_embeddings"] = before
    for key, named in YARN.items() if kind == "yarn" else ():
        value = header.metadata.get(f"{name}.rope.scaling.{key}")
        if isinstance(value, float):
            scaling[named] = shortest(value)
    return scaling


# -------------------------------------------------------------------------------- architectures


def _holds(header: GgufHeader, name: str) -> bool:
    return any(tensor.name == name for tensor in header.tensors)


def _biased(header: GgufHeader) -> Config:
    """Return what says that attention has biases, which is not the default of these models; {} where it has none."""
    return {"attention_bias": True} if _holds(header, "blk.0.attn_q.bias") else {}


def _llama(header: GgufHeader, config: Config) -> Config:
    rotary = header.count("llama.rope.dimension_count")
    found: Config = {
        "attention_bias": _holds(header, "blk.0.attn_q.bias"),
        "mlp_bias": _holds(header, "blk.0.ffn_up.bias"),
    }
    if rotary is not None and "head_dim" not in config:
        found["head_dim"] = rotary
    return found


def _is_mixtral(header: GgufHeader, name: str) -> bool:
    """Return whether a Llama has experts, as llama.cpp sees Mixtral."""
    return name == "llama" and bool(header.count("llama.expert_count"))


def _perhaps_biased(header: GgufHeader, config: Config) -> Config:
    return _biased(header)


def _per_head(config: Config) -> int:
    """Return how many numbers of the hidden size each head has; 0 where that is not stated."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0


def _queries(layers_of_27b: int, config: Config) -> Config:
    of_27b = config["num_hidden_layers"] == layers_of_27b
    scalar = _per_head(config) if of_27b else config.get("head_dim", 256)
    return {"query_pre_attn_scalar": scalar}


ASSUMED: Mapping[str, Callable[[Config], Config]] = {
    "qwen2moe": lambda config: {"norm_topk_prob": False, "decoder_sparse_step": 1},
    "qwen3moe": lambda config: {"norm_topk_prob": True, "decoder_sparse_step": 1},
    "gemma2": partial(_queries, 46),
    "gemma3": partial(_queries, 62),
}
"""What llama.cpp takes of an architecture by its name and sizes, whatever the model was trained with."""


def _assumed_or_biased(name: str, header: GgufHeader, config: Config) -> Config:
    return {**ASSUMED[name](config), **_biased(header)}


def _phi3(header: GgufHeader, config: Config) -> Config:
    rotary, per_head = header.count("phi3.rope.dimension_count"), _per_head(config)
    before = header.count("phi3.rope.scaling.original_context_length")
    found: Config = {}
    if rotary and per_head:
        found["partial_rotary_factor"] = rotary / per_head
    if before is not None:
        found["original_max_position_embeddings"] = before
    if "pad_token_id" not in config:  # its default is 32000, whatever the vocabulary
        found["pad_token_id"] = None
    return found


def _gpt_oss(header: GgufHeader, config: Config) -> Config:
    scaling = config.get("rope_scaling")
    whole = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {"rope_scaling": whole | scaling} if isinstance(scaling, dict) else {}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", fixed=_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", fixed=_perhaps_biased),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        EXPERTS,
        lambda header, config: ASSUMED["qwen2moe"](config),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS, partial(_assumed_or_biased, "qwen3moe")
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", fixed=_perhaps_biased),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", SOFTCAPS, partial(_assumed_or_biased, "gemma2")
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**SOFTCAPS, **LOCAL_BASE},
        partial(_assumed_or_biased, "gemma3"),
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", fixed=_phi3),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        _gpt_oss,
    ),
}
"""`general.architecture` -> the model of transformers."""
MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", {"expert_count": "num_local_experts"})
