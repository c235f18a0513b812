"""Writes `megatron.tsv` with Megatron's own models and Megatron-Bridge's own merge of q, k and v.

    python -m tests.golden.mappings.make_megatron CORE BRIDGE

CORE is a folder with the package `megatron.core` (megatron-core 0.16.1), BRIDGE one with
`megatron.bridge` (067f987df of 2026-08-22). The names are those of megatron-core's GPTModel, built
here on the CPU with its local modules; the renames below are Bridge's tables. A random state dict
converted like that is loaded into the model strictly, and its logits are compared with
transformers'. Then the names become Transformer Engine's, which is what users have, by Bridge's
tables again. Not run forward: DeepSeek-V3, whose attention needs Transformer Engine, and Gemma,
whose norms after the blocks do; their names are checked against Bridge's tables alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.golden.mappings.peer_code import peer_module
from tests.golden.mappings.tables import ROOT, read, rows, write
from tests.support.mapping_configs import TINY, iota

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]

DENSE = ("llama", "llama_tied", "qwen2", "qwen2_tied", "qwen3", "gpt2")
RUN = (*DENSE, "mixtral", "qwen2_moe", "qwen3_moe")
NAMED = (
    "deepseek_v3",
    "deepseek_v3_no_q_lora",
    "deepseek_v3_mtp",
    "gemma2",
    "gemma3_text",
    "gemma",
)
PLAIN = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "input_layernorm": "input_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "mlp.gate": "mlp.router",
    "block_sparse_moe.gate": "mlp.router",
    "mlp.shared_expert_gate": "mlp.shared_experts.gate_weight",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "final_layernorm",
}
GPT2 = {
    "wte": "embedding.word_embeddings",
    "wpe": "embedding.position_embeddings",
    "ln_1": "input_layernorm",
    "ln_2": "pre_mlp_layernorm",
    "attn.c_attn": "self_attention.linear_qkv",
    "attn.c_proj": "self_attention.linear_proj",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
    "ln_f": "decoder.final_layernorm",
}


def place(key: str, layers: int) -> tuple[str, str, str, str]:
    """(source prefix, the rest without suffix, suffix, Megatron's prefix) of a key of a layer."""
    parts = key.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    rest, suffix = parts[at + 1 : -1], parts[-1]
    if at < 0:
        return "", ".".join(rest), suffix, ""
    number = int(parts[at])
    prefix = f"decoder.layers.{number}."
    if number >= layers:
        block = not rest[0].startswith(("enorm", "hnorm", "eh_proj", "shared_head"))
        prefix = f"mtp.layers.{number - layers}." + ("mtp_model_layer." if block else "")
    return ".".join(parts[: at + 1]) + ".", ".".join(rest), suffix, prefix


def reference(disk: State, config: dict[str, Any], bridge: Any) -> State:
    """Bridge's tables applied to an HF state dict, names of the local modules."""
    import torch

    provider = SimpleNamespace(
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config.get("num_key_value_heads"),
        kv_channels=config.get("head_dim"),
        hidden_size=config["hidden_size"],
    )
    state: State = {}
    for key, value in disk.items():
        source, rest, suffix, prefix = place(key, config["num_hidden_layers"])
        if rest.endswith("q_proj") and "kv_lora_rank" not in config:
            each = [disk[f"{source}self_attn.{name}_proj.{suffix}"] for name in "qkv"]
            merged = bridge.merge_qkv_weights(provider, *each)
            state[f"{prefix}self_attention.linear_qkv.{suffix}"] = merged
        elif rest.endswith(("k_proj", "v_proj", "up_proj", ".w3")) or ".inv_freq" in key:
            continue
        elif rest.endswith(("gate_proj", ".w1")):
            other = key.replace("gate_proj", "up_proj").replace(".w1.", ".w3.")
            name = fc(rest, "linear_fc1")
            state[f"{prefix}{name}.{suffix}"] = torch.cat([value, disk[other]])
        elif rest.endswith(("down_proj", ".w2")):
            state[f"{prefix}{fc(rest, 'linear_fc2')}.{suffix}"] = value
        else:
            state[prefix + renamed(rest, suffix, config)] = value
    return state


def fc(rest: str, name: str) -> str:
    """`mlp.experts.3.gate_proj` -> `mlp.experts.local_experts.3.linear_fc1`."""
    block = rest.rpartition(".")[0].replace("block_sparse_moe", "mlp")
    block = block.replace("experts.", "experts.local_experts.")
    return f"{block}.{name}".replace("shared_expert.", "shared_experts.")


def renamed(rest: str, suffix: str, config: dict[str, Any]) -> str:
    if suffix == "e_score_correction_bias":
        return "mlp.router.expert_bias"
    if rest == "mlp.shared_expert_gate":
        return PLAIN[rest]
    if config["model_type"].startswith("gemma") and config["model_type"] != "gemma":
        gemma = {
            "post_attention_layernorm": "self_attention.linear_proj.post_layernorm",
            "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
        }
        if rest in gemma:
            return f"{gemma[rest]}.{suffix}"
    if rest == "post_attention_layernorm":
        return f"pre_mlp_layernorm.{suffix}"
    if rest == "self_attn.q_proj":
        return f"self_attention.linear_q_proj.{suffix}"
    return f"{PLAIN[rest]}.{suffix}"


def gpt2_reference(disk: State, config: dict[str, Any], bridge: Any) -> State:
    """GPT-2 has no Bridge: names by its modules, q, k and v merged by Bridge's function."""
    provider = SimpleNamespace(
        num_attention_heads=config["n_head"],
        num_query_groups=config["n_head"],
        kv_channels=None,
        hidden_size=config["n_embd"],
    )
    state: State = {}
    for key, value in disk.items():
        _, rest, suffix, prefix = place(key.removeprefix("transformer."), config["n_layer"])
        linear = rest.startswith(("attn", "mlp")) and suffix == "weight"
        value = value.T.contiguous() if linear else value
        if rest == "attn.c_attn":
            value = bridge.merge_qkv_weights(provider, *value.chunk(3))
        state[f"{prefix}{GPT2[rest]}.{suffix}"] = value
    return state


def padded(state: State, multiple: int = 128) -> State:
    """The vocabulary filled up with zeros, as Megatron-LM's --make-vocab-size-divisible-by."""
    import torch

    def fill(value: Tensor) -> Tensor:
        return torch.cat([value, value.new_zeros(-len(value) % multiple, value.shape[1])])

    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {key: fill(value) if key in vocabulary else value for key, value in state.items()}


def engine_names(state: State, config: dict[str, Any]) -> State:
    """The names that the same tensors have in Transformer Engine's modules."""
    fused = {
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    }
    sparse = {key.partition(".mlp.")[0] for key in state if ".mlp.router." in key}
    mixed = config["model_type"] in ("qwen2_moe", "qwen3_moe")
    result = {}
    for key, value in state.items():
        name = key
        for local, engine in fused.items():
            layer = key.partition(local)[0]
            dense = layer not in sparse and not mixed
            if local in key and (local == ".input_layernorm." or dense):
                name = key.replace(local, engine)
        if "kv_lora_rank" in config:
            name = key if ".input_layernorm." in key else name
            name = name.replace(".q_layernorm.", ".linear_q_up_proj.layer_norm_")
            name = name.replace(".kv_layernorm.", ".linear_kv_up_proj.layer_norm_")
        # One matrix an expert, numbered at the end of its name: the experts as they are grouped.
        name = re.sub(r"local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))", r"\2\1", name)
        result[name] = value
    return result


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig of a golden config.json."""
    import torch

    common = {
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
    }
    if config["model_type"] == "gpt2":
        return {
            **common,
            "num_layers": config["n_layer"],
            "hidden_size": config["n_embd"],
            "num_attention_heads": config["n_head"],
            "normalization": "LayerNorm",
            "activation_func": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        }
    experts = config.get("num_experts") or config.get("num_local_experts")
    moe: dict[str, Any] = {}
    if experts:
        dense = config.get("mlp_only_layers", [])
        layers = range(config["num_hidden_layers"])
        moe = {
            "num_moe_experts": experts,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_token_dispatcher_type": "allgather",
            "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
            "moe_layer_freq": [int(layer not in dense) for layer in layers],
            "moe_router_pre_softmax": not config.get("norm_topk_prob", True)
            and config["model_type"] != "mixtral",
            "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": "shared_expert_intermediate_size" in config,
        }
    return {
        **common,
        **moe,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim"),
        "ffn_hidden_size": config["intermediate_size"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config["model_type"].startswith("qwen2"),
        "qk_layernorm": config["model_type"].startswith("qwen3"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
    }


def built(config: dict[str, Any]) -> Any:
    """megatron-core's model of local modules."""
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    model_of = import_module("megatron.core.models.gpt.gpt_model").GPTModel
    config_of = import_module("megatron.core.transformer.transformer_config").TransformerConfig

    made = config_of(**arguments(config))
    options = {"normalization": made.normalization, "qk_layernorm": made.qk_layernorm}
    if made.num_moe_experts:
        spec = specs.get_gpt_decoder_block_spec(
            made, use_transformer_engine=False, **{"normalization": made.normalization}
        )
    else:
        spec = specs.get_gpt_layer_local_spec(**options)
    learned = config["model_type"] == "gpt2"
    return model_of(
        made,
        spec,
        vocab_size=128,
        max_sequence_length=64,
        position_embedding_type="learned_absolute" if learned else "rope",
        rotary_base=int(config.get("rope_parameters", {}).get("rope_theta", 10000)),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
    ).eval()


def check_logits(name: str, config: dict[str, Any], convert: Any, build: Any = built) -> None:
    """A random model of transformers, converted, has the same logits in Megatron."""
    import torch

    source = TINY[name].build()
    source.set_experts_implementation("eager")  # grouped ones want multiples of 16 bytes
    with torch.no_grad():
        for tensor in source.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    disk = saved(source)
    state = convert(disk)
    model = build(config)
    own = {key for key, value in model.state_dict().items() if value is not None}
    assert own == set(state), sorted(own ^ set(state))[:9]
    model.load_state_dict(state, strict=False)
    tokens = torch.arange(24).reshape(2, 12)
    future = torch.triu(torch.ones(12, 12), 1).bool()[None, None]
    with torch.no_grad():
        theirs = model(tokens, torch.arange(12).expand(2, 12), future)[..., :102]
        torch.testing.assert_close(theirs, source(tokens).logits, rtol=1e-3, atol=1e-4)
    print(name, "logits equal")


def saved(model: Any) -> State:
    """What the model saves."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        state: State = load_file(Path(folder, "model.safetensors"))
        return state


def start() -> None:
    """megatron-core on one CPU process."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29615", RANK="0", WORLD_SIZE="1")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo")
    import_module("megatron.core.parallel_state").initialize_model_parallel(1, 1)
    tracker = import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda self, name="": contextlib.nullcontext()
    # The module forgets it where Transformer Engine is absent.
    vars(import_module("megatron.core.transformer.moe.moe_utils"))["te_general_gemm"] = None


def main() -> None:
    core, bridge_code = Path(sys.argv[1]), Path(sys.argv[2])
    bridge = peer_module(bridge_code, "megatron.bridge.models.conversion.param_mapping")
    for loaded in [key for key in sys.modules if key.partition(".")[0] == "megatron"]:
        del sys.modules[loaded]
    sys.path.insert(0, str(core))
    start()
    for name in (*RUN, *NAMED):
        config = json.loads((ROOT / name / "config.json").read_text())
        function = gpt2_reference if name == "gpt2" else reference

        def convert(disk: State, function: Any = function, config: Any = config) -> State:
            return padded(function(disk, config, bridge))

        shapes = {key: row.shape for key, row in read(ROOT / name / "hf.tsv").items()}
        copies = ("3.embed_tokens.weight", "shared_head.head.weight")
        disk = {key: value for key, value in iota(shapes) if not key.endswith(copies)}
        how = "names checked against Bridge's tables alone"
        if name in RUN:
            check_logits(name, config, convert)
            how = "logits equal to transformers'"
        made_by = [f"megatron-core 0.16.1 and Megatron-Bridge 067f987df, {how}"]
        write(ROOT / name / "megatron.tsv", rows(engine_names(convert(disk), config)), made_by)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
