"""Hooks through which DDP, FSDP1 and FSDP2 send gradients: they compress them, or average them otherwise.

    ddp.register_comm_hook(PowerSGDState(...), powerSGD_hook)     what it has not sent yet, it keeps to itself

A run goes on bit for bit only through the same hooks. The state of one is in no checkpoint, unless the caller saves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ckptmap.live.model import module_walk
from ckptmap.live.model.flat_params import is_fsdp1

if TYPE_CHECKING:
    import torch

HOOKS = "communication hooks"
"""Name of the setting; a run without hooks has none."""
WITHOUT_STATE = frozenset({
    "ProcessGroup", "DefaultState", "LowPrecisionState", "_AllreduceUpcastHookState", "_OptimizerHookState",
})  # fmt: skip
"""torch's own classes of what hooks are given that never changes."""


def described(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the setting of a model's hooks; empty: it has none."""
    texts = sorted({_text(hook, state) for hook, state in _hooks(model)})
    return {HOOKS: texts} if texts else {}


def unsaved(model: torch.nn.Module, objects: Iterable[object]) -> list[str]:
    """Return the hooks whose state no checkpoint has. objects: what the caller saves as `stateful`."""
    given = [*objects]
    return sorted(
        {
            f"gradients go through {_text(hook, state)}, which is not saved"
            for hook, state in _hooks(model)
            if _keeps_state(state) and not any(state is one for one in given)
        }
    )


def _hooks(model: torch.nn.Module) -> Iterator[tuple[object, object]]:
    """Yield (hook, what it is given) of every wrapper."""
    for module in module_walk.modules(model):
        yield from getattr(module, "_comm_hooks", ())  # DDP
        if is_fsdp1(module) and getattr(module, "_comm_hook", None) is not None:
            yield module._comm_hook, module._comm_hook_state
        state: Any = getattr(module, "_get_fsdp_state", None)
        group: Any = getattr(state(), "_fsdp_param_group", None) if callable(state) else None
        if getattr(group, "_all_reduce_hook", None) is not None:
            yield group._all_reduce_hook, None
        if getattr(group, "gradient_divide_factor", None) is not None:
            yield f"division by {group.gradient_divide_factor}", None


def _text(hook: object, state: object) -> str:
    name = hook if isinstance(hook, str) else getattr(hook, "__qualname__", type(hook).__name__)
    return f"{name} with a {type(state).__name__}" if _keeps_state(state) else str(name)


def _keeps_state(state: object) -> bool:
    if state is None or isinstance(state, str | int | float | tuple):
        return False
    return not WITHOUT_STATE & {cls.__name__ for cls in type(state).__mro__}
