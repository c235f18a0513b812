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
from ckptmap.live.model.live_form import quantized_classes
from ckptmap.live.model.several_models import plain_names
from ckptmap.tensors import Path

if TYPE_CHECKING:
    import torch

__all__ = ["KEY", "getters", "recorded", "setters", "unsaved_keys", "without"]


def getters(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that have extra state to save, by plain key."""
    return _modules(model, "get_extra_state")


def setters(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that take extra state back, by plain key."""
    return _modules(model, "set_extra_state")


def unsaved_keys(model: torch.nn.Module) -> list[str]:
    """Return what modules put into a state dict by a `_save_to_state_dict` of their own beside parameters, buffers
    and extra state: nothing of it is saved. What torch's own and quantized ones write is of what they hold."""
    from torch import nn

    names = []
    for path, module in model.named_modules():
        cls = type(module)
        if cls._save_to_state_dict is nn.Module._save_to_state_dict:
            continue
        if cls._save_to_state_dict.__module__.startswith("torch.") or _is_quantized(module):
            continue
        written: dict[str, object] = {}
        cls._save_to_state_dict(module, written, "", True)
        known = {*module._parameters, *module._buffers, SEGMENT}
        own = [key for key, value in written.items() if key not in known and value is not None]
        names += [f"{path}.{key}" if path else key for key in own]
    return [
        f"{name} of the state dict, which a _save_to_state_dict of the module's own writes, is not saved: use"
        " get_extra_state() and set_extra_state()"
        for name in names
    ]


def _is_quantized(module: torch.nn.Module) -> bool:
    names = quantized_classes()
    return any(type(value).__name__ in names for value in module._parameters.values())


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
