"""Make the errors for a file that holds objects and no tensors: whole modules, numpy arrays, tensors on the meta device.

torch.save(model, PATH)                              one torch.nn.Module
{"epoch": 3, "model": model, "ema": None}            ultralytics: a module among other values
{"model": {"w": numpy.ndarray}}                      detectron2's model zoo
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptmap.core.formatting import counted
from ckptmap.core.state_paths import LAZY_PARAMETERS, NUMPY_ARRAYS, RESOLVED, RUN_ONCE, UNRESOLVED
from ckptmap.errors import SourceError
from ckptmap.formats.detect import saved_again
from ckptmap.tensors import Leaf, Opaque, Path

ARRAYS_TO_TENSORS = (
    'torch.utils._pytree.tree_map(lambda v: torch.as_tensor(v) if type(v).__name__ == "ndarray" else v, '
    "torch.load({}, weights_only=False))"
)
"""Loads a file, and makes a tensor of each numpy array in it."""
_GRAPH_MODULES = ("torch.fx.graph_module.reduce_graph_module",)
"""The function that rebuilds a traced module from its attributes."""


def no_tensors(leaves: Mapping[Path, Leaf], where: str) -> SourceError:
    """Return the error for leaves without a tensor that can be read."""
    objects = [leaf for leaf in leaves.values() if isinstance(leaf, Opaque)]
    if objects and all(leaf.is_empty for leaf in objects):
        return SourceError(
            "CKM206",
            f"{where}: holds {counted(len(objects), 'tensor')} on the meta device, which {'has' if len(objects) == 1 else 'have'} no values",
            "load weights into the model (model.to_empty(device='cpu') first), then save it again",
        )
    if objects and all(leaf.is_unresolved for leaf in objects):
        return SourceError("CKM206", f"{where}: each tensor is {UNRESOLVED}", RESOLVED)
    if objects and all(leaf.class_name in LAZY_PARAMETERS for leaf in objects):
        return SourceError(
            "CKM206",
            f"{where}: holds only parameters of lazy modules, which have no values yet",
            RUN_ONCE,
        )
    arrays = any(leaf.class_name in NUMPY_ARRAYS for leaf in objects)
    if arrays and not any(map(_is_module, objects)):
        return SourceError(
            "CKM206",
            f"{where}: holds numpy arrays in place of tensors",
            f"if you trust it, make tensors of them: {saved_again(where, ARRAYS_TO_TENSORS)}",
        )
    classes = sorted({leaf.class_name for leaf in objects})
    classes_text = ""
    if classes:
        classes_text = f"; it has objects of {', '.join(classes[:3])}, which ckptmap never builds"
    return SourceError(
        "CKM206", f"{where}: holds no model weights{classes_text}", way_to_tensors(leaves, where)
    )


def way_to_tensors(leaves: Mapping[Path, Leaf], where: str) -> str:
    """Return the hint for a file that holds objects and no tensors: the command that saves the state dict of the first
    module among them, else what to save in the program that made it."""
    for path, leaf in leaves.items():
        if isinstance(leaf, Opaque) and _is_module(leaf) and all(map(_is_name, path)):
            keys = "".join(f'["{name}"]' for name in path)
            load = f'torch.load({{}}, map_location="cpu", weights_only=False){keys}.state_dict()'
            return f"if you trust it, save the module's tensors where its program is installed: {saved_again(where, load)}"
    return "save the state dict: torch.save(model.state_dict(), PATH)"


def _is_module(leaf: Opaque) -> bool:
    """Return whether an object is a module, by the attributes that torch.nn.Module gives to each."""
    made = leaf.args[0] if leaf.args and leaf.class_name in _GRAPH_MODULES else leaf.state
    return isinstance(made, dict) and {"_parameters", "_modules"} <= made.keys()


def _is_name(key: object) -> bool:
    return isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_]+", key) is not None
