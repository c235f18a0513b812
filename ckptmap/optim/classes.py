"""The order of a transformers model's parameters, from its config alone: built on meta, no data.

Only classes that the installed transformers itself defines are built; code that a config names is
never run. Trainer puts parameters into two groups, those that decay and those that do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names that do not decay, beside all of nn.LayerNorm: transformers' `Trainer`, 5.x."""


def find_config(path: str, like: str | None) -> Path | None:
    """The config.json that was given, or that lies beside the weights."""
    if like is not None:
        given = Path(like)
        found = given if given.is_file() and given.name.endswith(".json") else given / CONFIG
        return found if found.is_file() else None
    base = Path(path) if Path(path).is_dir() else Path(path).parent
    places = (base / CONFIG, base / "huggingface" / CONFIG)
    return next((place for place in places if place.is_file()), None)


def from_config(
    config: Path, counts: Sequence[int], weights: Mapping[str, TensorInfo]
) -> list[list[str]] | None:
    """Names of the parameters of each group, of which there are `counts`: all in one group, or
    Trainer's two. None: no such class is installed, or its parameters are not these weights.
    """
    model = _on_meta(config, len(weights))
    if model is None:
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if any(name not in weights or weights[name].shape != shapes[name] for name in shapes):
        return None
    names = list(shapes)
    if len(counts) == 1:
        groups = [names]
    else:
        stay = _no_decay(model)
        groups = [[n for n in names if n not in stay], [n for n in names if n in stay]]
    return groups if [len(group) for group in groups] == list(counts) else None


def _no_decay(model: torch.nn.Module) -> set[str]:
    import torch

    found = {name for name, _ in model.named_parameters() if NO_DECAY.search(name.lower())}
    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            found |= {f"{prefix}.{name}" for name, _ in module.named_parameters()}
    return found


def _on_meta(config: Path, max_layers: int) -> torch.nn.Module | None:
    """The model that the config describes, without data; None where it cannot be built, or has
    more layers than there are weights."""
    described = _described(config, max_layers)
    if described is None:
        return None
    try:
        import torch
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return None
    cls: Any = getattr(transformers, described["architectures"][0], None)
    known = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not known or described.get("model_type") not in CONFIG_MAPPING:
        return None
    try:
        made = CONFIG_MAPPING[described["model_type"]].from_dict(described)
        with torch.device("meta"):
            model: torch.nn.Module = cls(made)
    except Exception:  # whatever a config can do wrong: it then tells no order
        return None
    return model


def _described(config: Path, max_layers: int) -> dict[str, Any] | None:
    """The config, without what would make transformers fetch or run code of others."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    layers = [value for key, value in found.items() if "layer" in key and isinstance(value, int)]
    names = found.get("architectures")
    one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    return _harmless(found) if one and all(count <= max_layers for count in layers) else None


def _harmless(value: Any) -> Any:
    """Kernels are named by `*_implementation`, and may be repositories; classes by `auto_map`."""
    if isinstance(value, dict):
        return {
            key: _harmless(item)
            for key, item in value.items()
            if not key.endswith(("_implementation", "_implementation_internal", "auto_map"))
            and key != "quantization_config"
        }
    return value
