"""Say what can be done with an adapter of peft, which is no checkpoint by itself."""

from __future__ import annotations

from pathlib import Path

from ckptmap.core.printable import quote
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.json_file import read_json

ADAPTER_CONFIG = "adapter_config.json"
SOFT_PROMPTS = frozenset(
    {"ADAPTION_PROMPT", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"}
)  # fmt: skip
"""Values of `peft_type` of adapters that change the input of a model, not its weights."""


def merged_elsewhere(kind: object) -> str:
    """Return the next step for an adapter of a `peft_type` that ckptmap does not merge."""
    if isinstance(kind, str) and kind in SOFT_PROMPTS:
        return "it adds nothing to the weights of its base, so nothing can be merged: load it beside its base with peft"
    return "ckptmap merges LoRA, rsLoRA and DoRA; merge others with peft: model.merge_and_unload()"


def merge_step(folder: Path, mounts: Mounts) -> str:
    """Return the next step for the directory of an adapter."""
    try:
        config = read_json(folder / ADAPTER_CONFIG, mounts)
    except (OSError, ValueError):  # the command says what is wrong with it
        config = {}
    kind = config.get("peft_type", "LORA") if isinstance(config, dict) else "LORA"
    return (
        f"ckptmap merge BASE {quote(str(folder))} DST" if kind == "LORA" else merged_elsewhere(kind)
    )
