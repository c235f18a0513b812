"""Divide the leaves of a saved dict into weights, optimizer state and all other values.

{"model": {...}, "optimizer": {...}, "step": 7}     weights at ("model",)
{"app": {"model": {...}, "optim": {...}}}           weights at ("app", "model")
{"layers.0.weight": ..., "optimizer": {...}}        weights at (), optimizer beside them
{"layers.0.weight": ..., "state": {...}, "param_groups": [...]}
{"layers.0.weight": ..., "state.layers.0.weight.exp_avg": ..., "param_groups.layers.0.weight.lr": ...}
                                                    both at (), as {**model, **optimizer}

A dict under a module's `_extra_state`, with its tensors, is one of the other values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from ckptmap.checkpoint.module_extra_state import state_at
from ckptmap.core.formatting import some
from ckptmap.core.printable import advised, quote
from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.errors import SourceError
from ckptmap.mapping.wrappers import strip_wrappers
from ckptmap.tensors import Cut, Leaf, Opaque, Path, StoredTensor

MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module", "weights", "app", "app_state")
OPTIMIZER_KEYS = (
    "optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizers", "opt",
    "optimizer_states",
)  # fmt: skip
RANDOM_KEYS = ("rng", "rng_state", "rng_states", "random_state", "random_states")
"""Dicts of tensors that are no weights: Composer keeps random states beside everything else."""
EXTRA_KEY = "extra"
"""Where our own outputs keep what is neither weight nor optimizer state."""


@dataclass(frozen=True)
class Roles:
    """Leaves by role; paths are relative to `model_root` and `optimizer_root`, else absolute."""

    model_root: Path
    model: Mapping[Path, Leaf]
    optimizer_root: Path | None
    optimizer: Mapping[Path, Leaf]
    others: Mapping[Path, Leaf]


_TENSORS = (StoredTensor, Cut)
STATE, GROUPS = "state", "param_groups"
_OF_AN_OPTIMIZER = {(STATE,), (GROUPS,)}
"""The keys of what `optimizer.state_dict()` returns."""
SHOWN = 8
"""How many dicts an error names."""


def is_tensor(leaf: Leaf) -> bool:
    return isinstance(leaf, _TENSORS) or (isinstance(leaf, Opaque) and bool(leaf.info))


def is_reserved_name(name: str) -> bool:
    """Return whether our own outputs keep no weights in a dict of this name."""
    return name == EXTRA_KEY or name in OPTIMIZER_KEYS


def split_roles(leaves: Mapping[Path, Leaf], root: str | None, where: str) -> Roles:
    """Return the leaves by role.

    Raises SourceError CKM205 where several dicts could be the weights, CKM206 where none is.
    """
    if isinstance(leaves, PlainTensors) and leaves and root is None:
        return Roles((), leaves, None, {}, {})
    _require_dict(leaves, root, where)
    mixed_in = _state_among_weights(leaves)
    tensors = [path for path, leaf in leaves.items() if is_tensor(leaf) and path not in mixed_in]
    if not tensors:
        from ckptmap.checkpoint.no_weights import no_tensors  # deferred: only a refusal needs it

        raise no_tensors(leaves, where)
    states = _states_of_optimizers(leaves)
    if root is None:
        candidates = (
            [path for path in tensors if not _is_below_any(path, states)] if states else tensors
        )
        model_root = _find_root(candidates, (), where)
    else:
        model_root = _given_root(tensors, root, where)
    has_root = bool(model_root) or root is not None
    optimizer_root = _find_optimizer(leaves, model_root, states)
    if optimizer_root is None and any(path[:-1] == model_root for path in mixed_in):
        optimizer_root = model_root
    only_weights = optimizer_root is None and len(tensors) == len(
        leaves
    )  # weights and nothing else
    if only_weights and not model_root and {*map(len, leaves)} == {1}:
        return Roles((), leaves, None, {}, {})
    model: dict[Path, Leaf] = {}
    optimizer: dict[Path, Leaf] = {}
    others: dict[Path, Leaf] = {}
    depth = len(model_root)
    for path, leaf in leaves.items():
        if optimizer_root is not None and (
            path in mixed_in
            if optimizer_root == model_root
            # An "optimizer": None, at the root itself, is no state.
            else _is_below(path, optimizer_root) and path != optimizer_root
        ):
            optimizer[path[len(optimizer_root) :]] = leaf
        elif (
            path[:depth] == model_root
            and path not in mixed_in
            and is_tensor(leaf)
            and (has_root or len(path) == 1)
            and (len(path) == depth + 1 or state_at(path[depth:-1]) is None)
        ):
            # Beside bare FQNs, a tensor in a dict of its own ({"w": ..., "rng": {"cpu": t}}) is none.
            model[path[depth:] if depth else path] = leaf
        else:
            others[path] = leaf
    return Roles(model_root, model, optimizer_root, optimizer, _without_extra(others))


def _state_among_weights(leaves: Mapping[Path, Leaf]) -> set[Path]:
    """Return the paths of optimizer state that lies in the dict of the weights themselves: `{**model,
    **optimizer}`, with what `optimizer.state_dict()` returns, or what torch makes flat of it."""
    nested = {path[: path.index(GROUPS)] for path in leaves if GROUPS in path}
    mixed_in = _flattened_among_weights(leaves)
    for root in nested:
        depth = len(root)
        if _keys_at(leaves, root) > _OF_AN_OPTIMIZER and any(
            is_tensor(leaf) for path, leaf in leaves.items() if path[:-1] == root
        ):
            ends = {end[0] for end in _OF_AN_OPTIMIZER}
            mixed_in.update(path for path in leaves if path[:depth] == root and path[depth] in ends)
    return mixed_in


def _flattened_among_weights(leaves: Mapping[Path, Leaf]) -> set[Path]:
    """Return those of flattened state: `state.<fqn>.exp_avg`, as `get_optimizer_state_dict` names it."""
    head = f"{GROUPS}."
    groups = [path for path in leaves if path and str(path[-1]).startswith(head)]
    mixed_in: set[Path] = set()
    for root in {path[:-1] for path in groups}:
        beside = [path for path in leaves if path[:-1] == root and path != root]
        flat = [path for path in beside if str(path[-1]).startswith((head, f"{STATE}."))]
        plain = strip_wrappers([str(path[-1]) for path in {*beside}.difference(flat)]).values()
        weights = {*plain, *(str(path[-1]) for path in flat)}  # a module may be called `state`
        owners = {_owner(path) for path in groups if path[:-1] == root} & weights
        mixed_in.update(path for path in flat if _owner(path) in owners)
    return mixed_in


def _owner(path: Path) -> str:
    """Return the weight that a flattened key belongs to: "state.<fqn>.<name>" -> "<fqn>"."""
    return str(path[-1]).partition(".")[2].rpartition(".")[0]


def _without_extra(leaves: dict[Path, Leaf]) -> dict[Path, Leaf]:
    """Return the leaves with the contents of `extra` moved one level up.

    They stay where one value would take the place of another, as in
    {"step": 2, "extra": {"step": 1}}, which ckptmap never writes.
    """
    cut = {path: path[1:] for path in leaves if path[0] == EXTRA_KEY and len(path) > 1}
    if not cut:
        return leaves
    others, contents = {*leaves} - {*cut}, {*cut.values()}
    if others & _all_above(contents) or contents & _all_above(others):
        return leaves
    return {cut.get(path, path): leaf for path, leaf in leaves.items()}


def _all_above(paths: Iterable[Path]) -> set[Path]:
    """Return the paths and those of all dicts above them."""
    return {path[:depth] for path in paths for depth in range(1, len(path) + 1)}


def _require_dict(leaves: Mapping[Path, Leaf], root: str | None, where: str) -> None:
    """Raise SourceError CKM206 for a file that holds one object and no dict of names, or only what
    `optimizer.state_dict()` returns."""
    if root is None and _is_an_optimizer(leaves):
        raise SourceError(
            "CKM206",
            f"{where}: holds the state of an optimizer and no model weights",
            "give the checkpoint of the model that it was saved with",
        )
    if () not in leaves:
        return
    leaf = leaves[()]
    if isinstance(leaf, dict):
        odd = next((key for key in leaf if not isinstance(key, str | int)), None)
        content = f"a dict with the key {odd!r:.60}" if leaf else "an empty dict"
    elif isinstance(leaf, Opaque) and leaf.info is None:
        content = f"one pickled object of class {leaf.class_name}, which ckptmap never builds"
    else:
        content = "one bare tensor" if is_tensor(leaf) else f"one {type(leaf).__name__}"
    from ckptmap.checkpoint.no_weights import way_to_tensors  # deferred: only a refusal needs it

    raise SourceError(
        "CKM206",
        f"{where}: holds {content}, expected a dict of names and tensors",
        way_to_tensors(leaves, where),
    )


def _is_an_optimizer(leaves: Mapping[Path, Leaf]) -> bool:
    """Return whether the leaves are what `optimizer.state_dict()` returns.

    For nearly all other files the first leaf tells that they are not.
    """
    first = next(iter(leaves), ())
    return first[:1] in _OF_AN_OPTIMIZER and {path[:1] for path in leaves} == _OF_AN_OPTIMIZER


def _is_below(path: Path, root: Path) -> bool:
    return path[: len(root)] == root


def _given_root(tensors: Sequence[Path], root: str, where: str) -> Path:
    prefix: Path = tuple(root.split("/")) if root else ()
    if not any(_is_below(path, prefix) for path in tensors):
        dict_names = list(dict.fromkeys(str(path[0]) for path in tensors if len(path) > 1))
        hint = "it is one dict of tensors: leave --source-root out"
        if dict_names:
            more = ", ..." if len(dict_names) > SHOWN else ""
            hint = f"name a dict that holds tensors: {', '.join(dict_names[:SHOWN])}{more}"
        raise SourceError("CKM205", f"{where}: no tensors under root {root!r}", hint)
    return prefix


def _find_root(tensors: list[Path], prefix: Path, where: str) -> Path:
    depth = len(prefix)
    inside = [path for path in tensors if _is_below(path, prefix)] if prefix else tensors
    dicts = list(dict.fromkeys(path[depth] for path in inside if len(path) > depth + 1))
    for name in MODEL_KEYS:
        if name in dicts:
            return _find_root(tensors, (*prefix, name), where)
    if any(len(path) == depth + 1 for path in inside):
        return prefix
    dicts = [name for name in dicts if name not in OPTIMIZER_KEYS]
    dicts = [name for name in dicts if name not in RANDOM_KEYS] or dicts
    dicts = [name for name in dicts if name != EXTRA_KEY] or dicts
    if len(dicts) == 1:
        return _find_root(tensors, (*prefix, dicts[0]), where)
    if not dicts:
        raise SourceError(
            "CKM206",
            f"{where}: holds no model weights, only what is named as optimizer state",
            _way_to_weights(where),
        )
    roots = ["/".join(map(str, (*prefix, name))) for name in dicts]
    raise SourceError(
        "CKM205",
        f"{where}: several dicts could be the weights: {some(roots, SHOWN)}",
        f"choose one, such as {advised(source_root=roots[0])}, or --source-root '' for all of them as one model",
    )


def _states_of_optimizers(leaves: Mapping[Path, Leaf]) -> set[Path]:
    """Return the paths of dicts that hold what `optimizer.state_dict()` returns and nothing else."""
    roots = {path[: path.index(GROUPS)] for path in leaves if GROUPS in path[1:]}
    return {root for root in roots if _keys_at(leaves, root) == _OF_AN_OPTIMIZER}


def _keys_at(paths: Iterable[Path], root: Path) -> set[Path]:
    """Return the keys of the dict at `root`, each as a path of one segment."""
    depth = len(root)
    return {path[depth : depth + 1] for path in paths if path[:depth] == root}


def _is_below_any(path: Path, roots: Collection[Path]) -> bool:
    return any(path[: len(root)] == root for root in roots)


def _find_optimizer(
    leaves: Mapping[Path, Leaf], model_root: Path, states: Collection[Path]
) -> Path | None:
    """Return the path of the optimizer's dict; None: there is none.

    It lies beside the weights or at a level above them, under a known name; else it is the only
    dict there that has the keys of `optimizer.state_dict()`.
    """
    for depth in range(len(model_root), -1, -1):
        level = model_root[:depth]
        # One pass for all names: few paths are longer than the level by two.
        deep = [path for path in leaves if len(path) > depth + 1 and path[:depth] == level]
        names = {path[depth] for path in deep}
        for name in OPTIMIZER_KEYS:
            if name in names:
                return _single_optimizer(
                    (*level, name), [path for path in deep if path[depth] == name]
                )
    candidates = [root for root in states if _is_below(model_root, root[:-1])]
    return candidates[0] if len(candidates) == 1 else None


def _single_optimizer(root: Path, paths: Sequence[Path]) -> Path:
    """Return the path of the single optimizer in a list, or in a dict by class name as Composer saves
    it; else `root` itself."""
    first = paths[0][len(root)]
    single = (*root, first)
    if not all(_is_below(path, single) for path in paths):
        return root
    return single if first == 0 or _keys_at(paths, single) == _OF_AN_OPTIMIZER else root


def _way_to_weights(where: str) -> str:
    """Return the hint for a checkpoint that is optimizer state by all its names."""
    path = FilePath(where)
    if re.fullmatch(
        r"optim(izer)?(_\d+)?", path.name
    ):  # accelerate's directory beside that of the weights
        return f"give the directory that holds the weights, too: {quote(str(path.parent))}"
    return "name the dict of the weights: --source-root NAME"
