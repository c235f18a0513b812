"""Read the modules, and which of them FSDP1 wrapped, from the `_metadata` of a saved `state_dict()`.

torch stores the version of every module in the attribute `_metadata` of a state dict, under the names
of `named_modules()` (torch/nn/modules/module.py, `state_dict`). FSDP1 removes its wrapper segment
`_fsdp_wrapped_module` from the keys, but not from these names. So they tell which modules were FSDP
units, for any StateDictType. DCP and `get_model_state_dict` drop `_metadata`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeGuard

from ckptmap.tensors import Path

FSDP1 = "_fsdp_wrapped_module"
MAX_DEPTH = 3
"""Depth to which nested dicts are searched for a state dict, as in {"app": {"model": {...}}}."""


def fsdp1_units(tree: object) -> dict[Path, tuple[str, ...]]:
    """Return, for the path of each state dict in `tree`, the stored names of the modules that FSDP1 wraps,
    in module order. State dicts without such modules are left out.

    {"model": {...}} whose `_metadata` has "_fsdp_wrapped_module" and "_fsdp_wrapped_module.layers.0.
    _fsdp_wrapped_module" -> {("model",): ("", "_fsdp_wrapped_module.layers.0")}
    """
    return {path: units for path, node in _dicts(tree, ()) if (units := _units(node))}


def module_order(tree: object) -> dict[Path, tuple[str, ...]]:
    """Return, for the path of each state dict in `tree`, the stored names of its modules in the model's order.

    A dict that somebody sorted or built anew has no `_metadata`, and is left out.
    """
    return {path: names for path, node in _dicts(tree, ()) if (names := _modules(node))}


def _dicts(node: object, path: Path) -> Iterator[tuple[Path, Mapping[object, object]]]:
    if isinstance(node, dict):
        yield path, node
        for key, value in node.items() if len(path) < MAX_DEPTH else ():
            if isinstance(key, str) and isinstance(value, dict):
                yield from _dicts(value, (*path, key))


def _units(node: Mapping[object, object]) -> tuple[str, ...]:
    names = [name.split(".") for name in _modules(node)]
    return tuple(".".join(name[:-1]) for name in names if name[-1] == FSDP1)


def _modules(node: Mapping[object, object]) -> tuple[str, ...]:
    listed = getattr(node, "_metadata", None)
    return tuple(filter(_is_text, listed)) if isinstance(listed, dict) else ()


def _is_text(name: object) -> TypeGuard[str]:
    return isinstance(name, str)
