"""Read the modules of a model from `_metadata` of its `state_dict()`.

torch keeps a version for every module in the attribute `_metadata` of the dict (torch/nn/modules/
module.py `state_dict`), under the names of `named_modules()`: wrappers, which keys lose, are still
in it. FSDP1's `_fsdp_wrapped_module` says there which modules are units, whatever the
StateDictType. DCP and `get_model_state_dict` do not keep it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptmap.tensors import Path

FSDP1 = "_fsdp_wrapped_module"
MAX_DEPTH = 3
"""Depth of nested dicts that is searched for the one of a module: {"app": {"model": {...}}}."""


def fsdp1_units(tree: object) -> dict[Path, tuple[str, ...]]:
    """Path of a state dict -> the modules in it that FSDP1 wraps, as stored, in module order.

    {"model": {...}} whose `_metadata` has "_fsdp_wrapped_module" and "_fsdp_wrapped_module.layers.0.
    _fsdp_wrapped_module" -> {("model",): ("", "_fsdp_wrapped_module.layers.0")}
    """
    return {path: units for path, node in _dicts(tree, ()) if (units := _units(node))}


def _dicts(node: object, path: Path) -> Iterator[tuple[Path, Mapping[object, object]]]:
    if isinstance(node, dict):
        yield path, node
        for key, value in node.items() if len(path) < MAX_DEPTH else ():
            if isinstance(key, str) and isinstance(value, dict):
                yield from _dicts(value, (*path, key))


def _units(node: Mapping[object, object]) -> tuple[str, ...]:
    listed = getattr(node, "_metadata", None)
    if not isinstance(listed, dict):
        return ()
    names = [name.split(".") for name in listed if isinstance(name, str)]
    return tuple(".".join(name[:-1]) for name in names if name[-1] == FSDP1)
