"""The transformers model that a config.json describes, built on meta: names, shapes, order, no data.

Only classes that the installed transformers itself defines are built. Entries by which a config
could make it fetch or run code (kernels, `auto_map`, quantizers) are removed first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.json_file import read_object
from ckptmap.storage.process_guards import quiet_torchao
from ckptmap.storage.resource_limits import unreadable

if TYPE_CHECKING:
    from torch import nn

MAX_LAYERS = 10_000
"""More layers than any model has; building a billion, as a config may ask, would not end."""


@quiet_torchao()
def on_meta(config: Path, mounts: Mounts, max_layers: int = MAX_LAYERS) -> nn.Module:
    """Return the model, on meta. Raises SourceError CKM101 if transformers cannot build it from the
    config."""
    described = _described(config, mounts, max_layers)
    try:
        import torch
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise unusable(config, "needs the transformers package to build its model") from None
    name = described["architectures"][0]
    cls: Any = getattr(transformers, name, None)
    known = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not known or str(described.get("model_type")) not in CONFIG_MAPPING:
        raise unusable(
            config,
            f"names the architecture {name!r}, which the installed transformers does not have",
        )
    try:
        settings = CONFIG_MAPPING[described["model_type"]].from_dict(described)
        with torch.device("meta"):
            model: nn.Module = cls(settings)
    except Exception as error:  # transformers raises nearly every type on an unfit config
        raise unusable(config, f"{type(error).__name__}: {str(error)[:200]}") from error
    return model


def _described(config: Path, mounts: Mounts, max_layers: int) -> dict[str, Any]:
    try:
        settings = read_object(config, mounts)
    except (OSError, ValueError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(config, error) from error
        raise unusable(config, f"cannot be read as JSON: {error}") from error
    names = settings.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise unusable(config, f"names the architectures {names!r}, expected a list of one")
    layers = [value for key, value in settings.items() if "layer" in key and isinstance(value, int)]
    if any(count > max_layers for count in layers):
        raise unusable(config, f"has {max(layers)} layers, expected at most {max_layers}")
    harmless: dict[str, Any] = _harmless(settings)
    return harmless


def _harmless(value: object) -> Any:
    """Return the config without entries that name code: `*_implementation` may name a repository of
    kernels, `auto_map` a class."""
    if isinstance(value, dict):
        return {
            key: _harmless(item)
            for key, item in value.items()
            if not key.endswith(("_implementation", "_implementation_internal", "auto_map"))
            and key != "quantization_config"
        }
    return value


def unusable(config: Path, problem: str) -> SourceError:
    return SourceError(
        "CKM101",
        f"{config}: {problem}",
        "give a checkpoint of the same model instead: --like PATH",
    )
