"""Writes `gguf.tsv` with the `gguf` package's table of names, and llama.cpp's changes of values.

    python -m tests.golden.mappings.make_gguf

The names are those of `gguf.get_tensor_name_map` (gguf 0.19.0). The changes (rows of q and k, norms of 1 + w,
stacked experts, gpt-oss' gate and up) are those that llama.cpp's convert_hf_to_gguf.py publishes, written again in
`tests/support/gguf_models.py`, because that script is no package. There, transformers' own loader of GGUF files and
the models' logits agree with them.
"""

from __future__ import annotations

import json
import re

import torch
from gguf import MODEL_ARCH, get_tensor_name_map

from tests.golden.mappings.tables import ROOT, read, rows, write
from tests.support.gguf_models import MODELS, Model, State
from tests.support.mapping_configs import iota

MADE = {
    "llama": "llama", "llama_tied": "llama", "llama_bias": "llama", "mistral": "llama", "qwen2": "qwen2",
    "qwen2_tied": "qwen2", "qwen3": "qwen3", "qwen3_tied": "qwen3", "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "gpt_oss": "gpt_oss",
    "gemma": "gemma", "mixtral": "mixtral",
}  # fmt: skip
SUFFIXES = (".weight", ".bias")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def stacked(state: State) -> State:
    """Return the state with the experts of a layer in one tensor, as the script stacks them."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    out: State = {}
    for key, w in state.items():
        match = EXPERT.fullmatch(key)
        if match is None:
            out[key] = w
        else:
            found.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = w
    return out | {key: torch.stack([of[e] for e in sorted(of)]) for key, of in found.items()}


def native(model: Model, state: State, config: dict[str, int]) -> State:
    table = get_tensor_name_map(model.arch, config["num_hidden_layers"])
    # A layer without experts in a model of experts: llama.cpp runs none, but its names are not in doubt.
    dense = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    made: State = {}
    for key, w in stacked(state).items():
        if key.endswith("inv_freq"):
            continue
        for each, values in model.change(key, w, config):
            names = (
                each_table.get_name(each, try_suffixes=SUFFIXES) for each_table in (table, dense)
            )
            name = next(filter(None, names), None)
            assert name is not None, each
            made[name] = values.contiguous()
    return made


def main() -> None:
    for name, by in MADE.items():
        shapes = {key: row.shape for key, row in read(ROOT / name / "hf.tsv").items()}
        config = json.loads((ROOT / name / "config.json").read_text())
        table = rows(native(MODELS[by], dict(iota(shapes)), config))
        write(ROOT / name / "gguf.tsv", table, ["gguf 0.19.0: get_tensor_name_map; llama.cpp: convert_hf_to_gguf.py"])  # fmt: skip


if __name__ == "__main__":
    main()
