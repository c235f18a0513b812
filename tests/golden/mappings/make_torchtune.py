"""Writes `torchtune.tsv` and `meta.tsv` with torchtune's own converters.

    python -m tests.golden.mappings.make_torchtune CODE

CODE is a folder that holds the package `torchtune` (bd2a0fc7c of 2026-04-23, the last commits of
the project). Meta's names are those that `tune_to_meta` gives for `hf_to_tune`; Llama and Mistral
publish their own files in them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.golden.mappings.peer_code import peer_module
from tests.golden.mappings.tables import ROOT, read, rows, write
from tests.support.mapping_configs import iota

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]

GENERIC = "torchtune.models.convert_weights"
FUNCTIONS = {
    "llama": (GENERIC, "hf_to_tune", "tune_to_hf"),
    "llama_tied": (GENERIC, "hf_to_tune", "tune_to_hf"),
    "mistral": (GENERIC, "hf_to_tune", "tune_to_hf"),
    "mistral_square": (GENERIC, "hf_to_tune", "tune_to_hf"),
    "gemma": (GENERIC, "hf_to_tune", "tune_to_hf"),
    "gemma2": (
        "torchtune.models.gemma2._convert_weights",
        "gemma2_hf_to_tune",
        "gemma2_tune_to_hf",
    ),
    "phi3": ("torchtune.models.phi3._convert_weights", "phi3_hf_to_tune", "phi3_tune_to_hf"),
    "qwen2": ("torchtune.models.qwen2._convert_weights", "qwen2_hf_to_tune", "qwen2_tune_to_hf"),
    "qwen2_tied": (
        "torchtune.models.qwen2._convert_weights",
        "qwen2_hf_to_tune",
        "qwen2_tune_to_hf",
    ),
    "qwen3": ("torchtune.models.qwen3._convert_weights", "qwen3_hf_to_tune", "qwen3_tune_to_hf"),
    "qwen3_tied": (
        "torchtune.models.qwen3._convert_weights",
        "qwen3_hf_to_tune",
        "qwen3_tune_to_hf",
    ),
}
META = ("llama", "mistral", "mistral_square")


def functions(code: Path, name: str) -> tuple[Callable[..., State], Callable[..., State], Any]:
    """torchtune's two functions for a model, and the module of the generic ones."""
    module, forward, reverse = FUNCTIONS[name]
    loaded = peer_module(code, module, [GENERIC])
    return getattr(loaded, forward), getattr(loaded, reverse), sys.modules[GENERIC]


def main() -> None:
    code = Path(sys.argv[1])
    for name in FUNCTIONS:
        config = json.loads((ROOT / name / "config.json").read_text())
        shapes = {key: row.shape for key, row in read(ROOT / name / "hf.tsv").items()}
        disk = dict(iota(shapes))
        forward, reverse, generic = functions(code, name)
        arguments = {
            "num_heads": config["num_attention_heads"],
            "num_kv_heads": config["num_key_value_heads"],
            "dim": config["hidden_size"],
        }
        if name != "phi3":
            arguments["head_dim"] = config.get("head_dim")
        native = forward(disk, **arguments)
        back = reverse(native) if name == "phi3" else reverse(native, **arguments)
        assert back.keys() == disk.keys() and all(back[key].equal(disk[key]) for key in disk), name
        made_by = [f"torchtune bd2a0fc7c: {forward.__name__}, checked by {reverse.__name__}"]
        write(ROOT / name / "torchtune.tsv", rows(native), made_by)
        if name in META:
            made_by = [f"torchtune bd2a0fc7c: tune_to_meta({forward.__name__}(…))"]
            write(ROOT / name / "meta.tsv", rows(generic.tune_to_meta(native)), made_by)


if __name__ == "__main__":
    main()
