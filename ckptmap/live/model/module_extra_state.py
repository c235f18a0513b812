"""State of modules that is no tensor: `get_extra_state()`, `set_extra_state()` of torch.nn.Module.

    save   {"0._extra_state": {...}}  -> ("extra", "module_extra_state", "0._extra_state", ...), of rank 0
    load   the same, or the value of such a key in a state dict that was saved whole

torch writes extra state into every state dict, so a model without it is not the one that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.module_extra_state import OWN as KEY
from ckptmap.checkpoint.module_extra_state import SEGMENT, extra_state_keys, is_extra_state
from ckptmap.core.state_paths import nest, opaques
from ckptmap.live.model import module_walk
from ckptmap.live.model.several_models import plain_names
from ckptmap.tensors import Path

if TYPE_CHECKING:
    import torch

__all__ = ["KEY", "getters", "recorded", "setters", "without"]


def getters(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that have extra state to save, by plain key."""
    return _modules(model, "get_extra_state")


def setters(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that take extra state back, by plain key."""
    return _modules(model, "set_extra_state")


def _modules(model: torch.nn.Module, method: str) -> dict[str, torch.nn.Module]:
    """Return the modules whose class defines `method` itself: that of torch.nn.Module raises."""
    from torch import nn

    found = {
        f"{path}.{SEGMENT}" if path else SEGMENT: module
        for path, module in module_walk.named_modules(model)
        if getattr(type(module), method) is not getattr(nn.Module, method)
    }
    return {plain: found[key] for key, plain in plain_names(model, found).items()}


def recorded(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the extra state in a checkpoint by plain key, tensors as LazyTensors.

    `ckptmap.save` stores it apart, other checkpoints in the model's state dict. A state that holds
    an object of an unknown class is left out: the rest of it would be another state."""
    found: dict[str, object] = {k: checkpoint[k] for k in checkpoint if is_extra_state(k)}
    values = {**checkpoint.plain, **checkpoint.other}
    places, keys = extra_state_keys(values, checkpoint.roles.model_root)
    leaves: dict[str, dict[Path, object]] = {}
    for path, at in places.items():
        leaves.setdefault(str(path[at]), {})[path[at:]] = values[path]
    for key, parts in leaves.items():
        if next(opaques(list(parts.values())), None) is None:
            found[keys[key]] = nest(parts)[key]
    return found


def without(values: Mapping[Path, object], checkpoint: Checkpoint) -> dict[Path, object]:
    """Return the extra values that are no state of the model's modules."""
    states, _ = extra_state_keys(values, checkpoint.roles.model_root)
    return {path: value for path, value in values.items() if path not in states}
