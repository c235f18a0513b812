"""The order of a transformers model's parameters, from its config.json: the model is built on meta.

Only classes that the installed transformers itself defines are built; code that a config names is
never run. Trainer puts parameters into two groups, those that decay and those that do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.transformers_meta_model import on_meta
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
MIN_LAYERS = 1000
"""A config may have so many layers even if few of the parameters are trained."""
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names without weight decay, beside all of nn.LayerNorm: transformers' `Trainer`, 5.x."""


def find_config(path: str, like: str | None) -> Path | None:
    """Return the config.json that `like` names, or that lies beside the weights; None if there is none."""
    if like is not None:
        config_path = Path(like)
        file = (
            config_path
            if config_path.is_file() and config_path.name.endswith(".json")
            else config_path / CONFIG
        )
        return file if file.is_file() else None
    base = Path(path) if Path(path).is_dir() else Path(path).parent
    places = (base / CONFIG, base / "huggingface" / CONFIG)
    return next((place for place in places if place.is_file()), None)


def from_config(
    config: Path, mounts: Mounts, counts: Sequence[int], weights: Mapping[str, TensorInfo]
) -> list[list[str]] | None:
    """Return the names of the parameters of each group: all in one group, or Trainer's two.

    `counts` are the sizes of the groups. None: no such class is installed, or its parameters are not
    these weights.
    """
    model = _model(config, mounts, weights)
    if model is None:
        return None
    groups = _in_two(model) if len(counts) != 1 else [[n for n, _ in model.named_parameters()]]
    if any(name not in weights for group in groups for name in group):
        return None
    return groups if [len(group) for group in groups] == list(counts) else None


def decay_groups(
    config: Path, mounts: Mounts, trained: Mapping[str, TensorInfo]
) -> list[list[str]] | None:
    """Return the trained parameters in Trainer's two groups: with weight decay, without.

    None: no such class is installed, or it does not have all of them.
    """
    model = _model(config, mounts, trained)
    if model is None:
        return None
    groups = [[name for name in group if name in trained] for group in _in_two(model)]
    return groups if sum(map(len, groups)) == len(trained) else None


def _model(
    config: Path, mounts: Mounts, weights: Mapping[str, TensorInfo]
) -> torch.nn.Module | None:
    """Return the model on meta; None if it cannot be built, or a weight has another shape."""
    try:
        model = on_meta(config, mounts, max(MIN_LAYERS, len(weights)))
    except SourceError:  # it then tells no order
        return None
    for name, parameter in model.named_parameters():
        if name in weights and weights[name].shape != tuple(parameter.shape):
            return None
    return model


def _in_two(model: torch.nn.Module) -> list[list[str]]:
    names = [name for name, _ in model.named_parameters()]
    stay = _no_decay(model)
    return [[n for n in names if n not in stay], [n for n in names if n in stay]]


def _no_decay(model: torch.nn.Module) -> set[str]:
    import torch

    names = {name for name, _ in model.named_parameters() if NO_DECAY.search(name.lower())}
    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            names |= {f"{prefix}.{name}" for name, _ in module.named_parameters()}
    return names
