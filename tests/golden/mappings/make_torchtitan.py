"""Writes `torchtitan@ERA.tsv` with torchtitan's own state dict adapters.

    python -m tests.golden.mappings.make_torchtitan ERA CODE

CODE is a folder that holds the package `torchtitan` as it was in ERA. Names changed inside one
project (dates of the commits to the adapters):

    2025-07   attention.wq, output, moe.experts.w1             v0.2.2, 2026-02-20
    2026-04a  attention.qkv_linear.wq          (#2878)         ad7a86533, 2026-04-16
    2026-04b  lm_head                          (#2937)         f39e12458, 2026-05-27
    2026-06   moe.experts.w1_EFD               (#3425, #3626)  0e886617e, 2026-06-27
    2026-07   moe.routed_experts.inner_experts (#3859)         5c0b804ce, 2026-08-10
    2026-08   mtp_layers, beside the others    (#3392)         b5bcd76c6, 2026-08-21

The last only adds layers, so that its table belongs to era 2026-07. In 2026-04a and b a model could
be configured to keep q, k and v in one matrix, group by group, and saved it like that
(`torchtitan-fused@ERA.tsv`); since #3656 of 2026-06-18 it saves them apart.

gpt-oss: the adapter names the keys of the MXFP4 files, which torch's reader decodes to
[experts, 2 * ffn, hidden] before the adapter sees them; transformers keeps the transpose of that
in its bfloat16 files. So the adapter is given the transposed tensors under its own key names. And
it did not follow when the model's parameters got their axes for a suffix (#3425); checkpoints have
the model's names, so they are put in here after models/gpt_oss/moe.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.golden.mappings.peer_code import peer_module
from tests.golden.mappings.tables import ROOT, read, rows, write
from tests.support.mapping_configs import iota

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]

ERAS = {
    "2025-07": "v0.2.2",
    "2026-04a": "ad7a86533",
    "2026-04b": "f39e12458",
    "2026-06": "0e886617e",
    "2026-07": "5c0b804ce",
    "2026-08": "b5bcd76c6",
}
ADAPTERS = {
    "llama": ("llama3", "Llama3StateDictAdapter"),
    "llama_tied": ("llama3", "Llama3StateDictAdapter"),
    "qwen3": ("qwen3", "Qwen3StateDictAdapter"),
    "qwen3_tied": ("qwen3", "Qwen3StateDictAdapter"),
    "qwen3_moe": ("qwen3", "Qwen3StateDictAdapter"),
    "deepseek_v3": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
    "deepseek_v3_no_q_lora": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
    "deepseek_v3_mtp": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
    "gpt_oss": ("gpt_oss", "GptOssStateDictAdapter"),
}
# Tables of one era that only the code of a later one can make: layers that it added, and the head
# size that Llama's adapter took to be hidden / heads before 2026-06-08 (#3570).
LABELS = {("deepseek_v3_mtp", "2026-08"): "2026-07", ("llama_tied", "2026-06"): "2026-04b"}
# Eras that differ for these models; in the others they look as in the era before.
CHANGES = {
    "llama": {"2025-07", "2026-04a", "2026-04b"},
    "llama_tied": {"2026-06"},
    "qwen3": {"2025-07", "2026-04a", "2026-04b"},
    "qwen3_tied": {"2025-07", "2026-04a", "2026-04b"},
    "qwen3_moe": {"2025-07", "2026-04a", "2026-04b", "2026-06", "2026-07"},
    "deepseek_v3": {"2025-07", "2026-04b", "2026-06", "2026-07"},
    "deepseek_v3_no_q_lora": {"2025-07", "2026-04b", "2026-06", "2026-07"},
    "deepseek_v3_mtp": {"2026-08"},
    "gpt_oss": {"2025-07", "2026-04a", "2026-04b", "2026-06", "2026-07"},
}
FUSED = ("llama", "qwen3", "qwen3_moe", "gpt_oss")
GPT_OSS_SUFFIX = {
    "mlp1_weight": "_EGD",
    "mlp1_bias": "_EG",
    "mlp2_weight": "_EDF",
    "mlp2_bias": "_ED",
}


def model_config(config: dict[str, Any]) -> SimpleNamespace:
    """What adapters of any era ask of the model's arguments."""
    heads, experts = (
        config["num_attention_heads"],
        SimpleNamespace(
            num_experts=config.get("num_local_experts") or config.get("n_routed_experts")
        ),
    )
    q_lora_rank = config.get("q_lora_rank") or 0
    attention = SimpleNamespace(
        n_heads=heads,
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim"),
        q_lora_rank=q_lora_rank,
        qkv_linear=None,
    )
    layer = SimpleNamespace(attention=attention, moe=experts)
    return SimpleNamespace(
        n_heads=heads,
        n_kv_heads=config["num_key_value_heads"],
        dim=config["hidden_size"],
        layers=[layer] * config["num_hidden_layers"],
        mtp_layers=[layer] * config.get("num_nextn_predict_layers", 0),
        enable_weight_tying=config["tie_word_embeddings"],
        q_lora_rank=q_lora_rank,
        moe_args=experts,
    )


def adapter(code: Path, name: str, config: dict[str, Any], fused: bool) -> Any:
    """torchtitan's adapter for one model, wherever that era keeps the file."""
    model, class_name = ADAPTERS[name]
    path = code / f"torchtitan/models/{model}/state_dict_adapter.py"
    middle = "" if path.is_file() else ".model"
    module = peer_module(
        code,
        f"torchtitan.models.{model}{middle}.state_dict_adapter",
        ["torchtitan.protocols.state_dict_adapter", "torchtitan.models.utils"],
    )
    arguments = model_config(config)
    if fused:
        arguments.layers[0].attention.qkv_linear = module.FusedQKVLinear.Config()
    made = getattr(module, class_name)(arguments, None)
    made._validate_hf_rope_config = lambda *args: None  # looks at the model's class, at no tensor
    return made


def seen_by_adapter(name: str, disk: State) -> State:
    """The state dict as torchtitan's readers hand it to the adapter."""
    if name != "gpt_oss":
        # torchtitan asks its reader for the tensors that its model has; the two that the
        # next-token layer repeats from the main model are not among them.
        twice = ("layers.3.embed_tokens.weight", "layers.3.shared_head.head.weight")
        return {key: value for key, value in disk.items() if not key.endswith(twice)}
    blocks = ("experts.gate_up_proj", "experts.down_proj")
    return {
        (key + "_blocks" if key.endswith(blocks) else key): (
            value.transpose(1, 2).contiguous() if key.endswith(blocks) else value
        )
        for key, value in disk.items()
    }


def make(era: str, code: Path, name: str, fused: bool = False) -> None:
    config = json.loads((ROOT / name / "config.json").read_text())
    shapes = {key: row.shape for key, row in read(ROOT / name / "hf.tsv").items()}
    disk = seen_by_adapter(name, dict(iota(shapes)))
    native = adapter(code, name, config, fused).from_hf(dict(disk))
    back = adapter(code, name, config, fused).to_hf(dict(native))
    assert back.keys() == disk.keys() and all(back[key].equal(disk[key]) for key in disk), name
    if name == "gpt_oss" and era >= "2026-06":
        native = {
            key + GPT_OSS_SUFFIX.get(key.rpartition(".")[2], ""): value
            for key, value in native.items()
        }
    made_by = [f"torchtitan {ERAS[era]}: {ADAPTERS[name][1]}.from_hf, checked by to_hf"]
    label = LABELS.get((name, era), era)
    scheme = "torchtitan-fused" if fused else "torchtitan"
    write(ROOT / name / f"{scheme}@{label}.tsv", rows(native), made_by)


def main() -> None:
    era, code = sys.argv[1], Path(sys.argv[2])
    for name, eras in CHANGES.items():
        if era in eras:
            make(era, code, name)
            if name in FUSED and era in ("2026-04a", "2026-04b"):
                make(era, code, name, fused=True)


if __name__ == "__main__":
    main()
