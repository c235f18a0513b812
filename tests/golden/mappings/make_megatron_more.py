"""Writes `megatron.tsv` of gpt-oss, Phi-3, GPT-NeoX and Falcon with the converters of their peers.

    python -m tests.golden.mappings.make_megatron_more CORE BRIDGE NEMO

CORE and BRIDGE are those of `make_megatron`, NEMO is a clone of NVIDIA/NeMo (8cfedd72 of
2025-09-20). gpt-oss goes through Megatron-Bridge's functions, q, k and v of Phi-3 and the names of
Falcon through NeMo's; GPT-NeoX is only renamed, to the names of megatron-core's own modules. Each
random state dict converted like that is loaded strictly into megatron-core's GPTModel of local
modules, Falcon's with NeMo's own layer in it, and its logits are compared with transformers'.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.golden.mappings.make_megatron import (
    State,
    check_logits,
    engine_names,
    padded,
    place,
    start,
)
from tests.golden.mappings.peer_code import peer_module
from tests.golden.mappings.tables import ROOT, read, rows, write
from tests.support.mapping_configs import iota

PHI3 = "nemo/collections/llm/gpt/model/phi3mini.py"
GPT_OSS = "megatron/bridge/models/gpt_oss/gpt_oss_bridge.py"
GATED = "GPTOSSMLPGateUpProjMapping"
FALCON = "scripts/checkpoint_converters/convert_falcon_hf_to_nemo.py"
LAYER = "nemo.collections.nlp.models.language_modeling.megatron.falcon.falcon_decoder_layer"
COMMON = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn": "self_attention.core_attention",
    "mlp.router": "mlp.router",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "gpt_neox.embed_in": "embedding.word_embeddings",
    "gpt_neox.final_layer_norm": "decoder.final_layernorm",
    "embed_out": "output_layer",
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


def peer_function(file: Path, name: str, given: dict[str, Any]) -> Any:
    """One function of a file that cannot be imported here, with the globals that it needs."""
    body: Any = ast.parse(file.read_text()).body
    for part in name.split("."):
        (found,) = (node for node in body if getattr(node, "name", "") == part)
        body = found.body
    found.decorator_list = []
    scope = {"Dict": dict, **given}
    exec(compile(ast.Module([found], []), str(file), "exec"), scope)
    return scope[found.name]


def sizes(config: dict[str, Any]) -> SimpleNamespace:
    """What the peers' functions ask a Megatron config for."""
    heads = config["num_attention_heads"]
    return SimpleNamespace(
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        hidden_size=config["hidden_size"],
    )


def renamed(key: str, config: dict[str, Any]) -> str:
    _, rest, suffix, prefix = place(key, config["num_hidden_layers"])
    suffix = {"sinks": "softmax_offset"}.get(suffix, suffix)
    return f"{prefix}{COMMON[rest]}.{suffix}"


def gpt_oss(disk: State, config: dict[str, Any], merges: Any, in_blocks: Any) -> State:
    """Bridge's table, its merge of q, k and v, and its order of gate and up."""
    state: State = {}
    for key, value in disk.items():
        source, rest, suffix, prefix = place(key, config["num_hidden_layers"])
        if rest == "self_attn.q_proj":
            merge = merges.merge_qkv_biases if suffix == "bias" else merges.merge_qkv_weights
            each = [disk[f"{source}self_attn.{name}_proj.{suffix}"] for name in "qkv"]
            state[f"{prefix}self_attention.linear_qkv.{suffix}"] = merge(sizes(config), *each)
        elif rest == "mlp.experts":
            gated = suffix.startswith("gate_up")
            kind = "bias" if suffix.endswith("_bias") else "weight"
            name = f"{'linear_fc1' if gated else 'linear_fc2'}.{kind}"
            for number, expert in enumerate(value):
                expert = expert.T if expert.ndim == 2 else expert
                expert = in_blocks(expert) if gated else expert
                at = f"{prefix}mlp.experts.local_experts.{number}.{name}"
                state[at] = expert.contiguous()
        elif rest not in ("self_attn.k_proj", "self_attn.v_proj"):
            state[renamed(key, config)] = value
    return state


def phi3(disk: State, config: dict[str, Any], import_qkv: Any) -> State:
    """NeMo's order of q, k and v."""
    context = SimpleNamespace(target=SimpleNamespace(config=sizes(config)))
    return {
        key.replace("model.", "decoder.").replace("self_attn.qkv_proj", "self_attention.linear_qkv")
        if "qkv_proj" in key
        else renamed(key, config): import_qkv(context, value) if "qkv_proj" in key else value
        for key, value in disk.items()
    }


def gpt_neox(disk: State, config: dict[str, Any]) -> State:
    return {renamed(key, config): value for key, value in disk.items()}


def falcon(disk: State, config: dict[str, Any], nemo: Path) -> State:
    """NeMo's names; a model of transformers has its output matrix beside the embedding."""
    given = {"falcon_config": SimpleNamespace(**config), "torch": import_module("torch")}
    convert = peer_function(nemo / FALCON, "convert_state_dict", given)
    state = convert({**disk, "lm_head.weight": disk["transformer.word_embeddings.weight"]})
    return {key.removeprefix("model."): value for key, value in state.items()}


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig of a golden config.json."""
    import torch

    functional = torch.nn.functional
    kind = config["model_type"]
    plain = kind in ("gpt_neox", "falcon")
    found: dict[str, Any] = {
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": groups(config),
        "kv_channels": config.get("head_dim"),
        "ffn_hidden_size": config.get("intermediate_size") or config.get("ffn_hidden_size"),
        "gated_linear_unit": not plain,
        "activation_func": functional.gelu if plain else functional.silu,
        "add_bias_linear": kind in ("gpt_neox", "gpt_oss"),
        "normalization": "LayerNorm" if plain else "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-5),
    }
    if kind == "gpt_oss":
        found |= {
            "add_qkv_bias": True,
            "activation_func": import_module("megatron.core.fusions.fused_bias_geglu").quick_gelu,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
            "num_moe_experts": config["num_local_experts"],
            "moe_ffn_hidden_size": config["intermediate_size"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_token_dispatcher_type": "allgather",
        }
    return found


def groups(config: dict[str, Any]) -> int:
    if config["model_type"] != "falcon":
        return int(config.get("num_key_value_heads", config["num_attention_heads"]))
    return int(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)


def built(config: dict[str, Any]) -> Any:
    """megatron-core's model of local modules."""
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    model_of = import_module("megatron.core.models.gpt.gpt_model").GPTModel
    config_of = import_module("megatron.core.transformer.transformer_config").TransformerConfig

    made = config_of(**arguments(config))
    spec = specs.get_gpt_layer_local_spec(
        num_experts=made.num_moe_experts, normalization=made.normalization
    )
    if config["model_type"] == "falcon":
        made.new_decoder_architecture = config["new_decoder_architecture"]
        made.parallel_attention = config["parallel_attn"]
        spec.module = falcon_layer()
    rope = config["rope_parameters"]
    return model_of(
        made,
        spec,
        vocab_size=128,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=int(rope["rope_theta"]),
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=False,
    ).eval()


def falcon_layer() -> type:
    """NeMo's layer, which knows fewer arguments than this megatron-core gives."""
    import torch

    layer: Any = import_module(LAYER).FalconTransformerLayer

    class Layer(layer):  # type: ignore[misc]
        def __init__(self, config: Any, submodules: Any, layer_number: int = 1, **_: Any) -> None:
            super().__init__(config, submodules, layer_number)

        def forward(self, hidden_states: Any, attention_mask: Any, **given: Any) -> Any:
            # Without gradients this megatron-core adds the residual in place, to what is used again.
            with torch.enable_grad():
                return super().forward(
                    hidden_states, attention_mask, rotary_pos_emb=given["rotary_pos_emb"]
                )

    return Layer


def main() -> None:
    core, bridge_code, nemo = map(Path, sys.argv[1:4])
    merges = peer_module(bridge_code, "megatron.bridge.models.conversion.param_mapping")
    for loaded in [key for key in sys.modules if key.partition(".")[0] == "megatron"]:
        del sys.modules[loaded]
    sys.path.insert(0, str(core))
    start()
    peer_module(nemo, LAYER)
    torch = import_module("torch")
    given = {"torch": torch, "io": SimpleNamespace(TransformCTX=object)}
    import_qkv = peer_function(nemo / PHI3, "_import_qkv", given)
    in_blocks = peer_function(bridge_code / GPT_OSS, f"{GATED}._interleave", given)
    functions: dict[str, Any] = {
        "gpt_oss": (lambda d, c: gpt_oss(d, c, merges, in_blocks), "Megatron-Bridge 067f987df"),
        "phi3": (lambda d, c: phi3(d, c, import_qkv), "NeMo 8cfedd72"),
        "gpt_neox_sequential": (gpt_neox, "the names of its own modules"),
        "falcon_new": (lambda d, c: falcon(d, c, nemo), "NeMo 8cfedd72"),
        "falcon_multi_query": (lambda d, c: falcon(d, c, nemo), "NeMo 8cfedd72"),
    }
    for name, (function, peer) in functions.items():
        config = json.loads((ROOT / name / "config.json").read_text())

        def convert(disk: State, function: Any = function, config: Any = config) -> State:
            return padded(function(disk, config))

        check_logits(name, config, convert, built)
        shapes = {key: row.shape for key, row in read(ROOT / name / "hf.tsv").items()}
        made = convert(dict(iota(shapes)))
        table = rows(made if config["model_type"] == "falcon" else engine_names(made, config))
        made_by = [f"megatron-core 0.16.1 and {peer}, logits equal to transformers'"]
        write(ROOT / name / "megatron.tsv", table, made_by)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
