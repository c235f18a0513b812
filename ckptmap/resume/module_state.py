"""What modules keep beside tensors: `get_extra_state()`, `set_extra_state()` of torch.nn.Module.

    save   {"0._extra_state": {...}}  -> ("extra", "module_extra_state", "0._extra_state", ...), of rank 0
    load   the same, or what a state dict that was saved whole has under such a key

torch writes it into every state dict, so a model without it is not the one that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint import Checkpoint
from ckptmap.leaves import nest, opaques
from ckptmap.mapping.wrappers import strip_wrappers
from ckptmap.tensors import Path

if TYPE_CHECKING:
    import torch

KEY = "module_extra_state"
EXTRA_STATE = "_extra_state"
"""The last segment of its key in a state dict."""


def getters(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that have some to save, by plain key."""
    return _modules(model, "get_extra_state")


def setters(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that take some back, by plain key."""
    return _modules(model, "set_extra_state")


def _modules(model: torch.nn.Module, method: str) -> dict[str, torch.nn.Module]:
    """Those of a class that has its own method: torch's raises."""
    from torch import nn

    found = {
        f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: module
        for path, module in model.named_modules()
        if getattr(type(module), method) is not getattr(nn.Module, method)
    }
    return {plain: found[key] for key, plain in strip_wrappers(found, "model").items()}


def recorded(checkpoint: Checkpoint) -> dict[str, Any]:
    """By plain key, tensors as LazyTensors: what `ckptmap.save` put there, and of a state dict what
    is whole: where one holds tensors among other things, they are weights that nobody expects, and
    a part of it would be another state."""
    own = nest({p: v for p, v in {**checkpoint.plain, **checkpoint.other}.items() if p[0] == KEY})
    found: dict[str, Any] = {k: checkpoint[k] for k in checkpoint if is_extra_state(k)}
    leaves: dict[str, dict[Path, Any]] = {}
    for path, value in checkpoint.plain.items():
        at = next((n for n, segment in enumerate(path) if is_extra_state(segment)), None)
        if at is not None and path[0] != KEY:
            leaves.setdefault(str(path[at]), {})[path[at:]] = value
    keys = strip_wrappers(leaves, "state dict")
    for key, values in leaves.items():
        torn = any(name.startswith(f"{keys[key]}.") for name in checkpoint)
        if not torn and next(opaques(list(values.values())), None) is None:
            found[keys[key]] = nest(values)[key]
    taken = own.get(KEY)
    return {**found, **(taken if isinstance(taken, Mapping) else {})}


def is_extra_state(key: object) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2] == EXTRA_STATE
