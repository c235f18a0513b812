"""State of modules that is no tensor: `get_extra_state()`, `set_extra_state()` of torch.nn.Module.

    save   {"0._extra_state": {...}}  -> ("extra", "module_extra_state", "0._extra_state", ...), of the lowest rank
                                         that has the module; beside it what other ranks have of their own
    load   the same, or the value of such a key in a state dict that was saved whole

torch writes extra state into every state dict, so a model without it is not the one that was saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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

__all__ = [
    "KEY", "NAMES", "OF_RANKS", "getters", "of_this_rank", "recorded", "setters", "unsaved_keys", "without",
]  # fmt: skip

OF_RANKS = "module_extra_state_of_ranks"
"""Key, among the extra values, of the states by rank that are others than those of the lowest rank."""
NAMES = "modules_with_extra_state"
"""Setting that has the keys of each rank's states: stages of a pipeline have others."""


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


def of_this_rank(
    checkpoint: Checkpoint, by_rank: Mapping[str, object], own: str, names: object,
    takers: Collection[str],
) -> tuple[dict[str, object], list[str]]:  # fmt: skip
    """Return the states for this rank, and the keys of those of which it takes another rank's.

    by_rank  what the checkpoint has under `OF_RANKS`
    own      name of this rank where as many ranks as now have saved; else ""
    names    the keys of the states that this rank had then; no list: they are not known. Those of other ranks
             alone are left out, unless `takers` has them
    """
    states, mine = recorded(checkpoint), by_rank.get(own)
    if isinstance(mine, Mapping):
        states |= mine
    if own and isinstance(names, list | tuple):
        states = {key: one for key, one in states.items() if key in takers or key in names}
    theirs = (one for one in by_rank.values() if isinstance(one, Mapping) and not own)
    return states, sorted({key for one in theirs for key in one})


def without(values: Mapping[Path, object], checkpoint: Checkpoint) -> dict[Path, object]:
    """Return the extra values that are no state of the model's modules."""
    states, _ = extra_state_keys(values, checkpoint.roles.model_root)
    return {path: value for path, value in values.items() if path not in states}
