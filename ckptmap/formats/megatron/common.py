"""Select the values that Megatron-LM saves beside the weights: arguments, counters, random states.

    {"args": Namespace(...), "iteration": 100, "checkpoint_version": 3.0, "opt_param_scheduler": {},
     "rng_state": [...], "optimizer": {...}}

Plain values are kept, and the plain ones of the arguments as a dict. A value that holds tensors or
objects of other classes is left out, and a note names it. Source: Megatron-LM,
training/checkpointing.py (`generate_state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.core.state_tree import holds_tensor, nest
from ckptmap.tensors import Leaf, Opaque, Path, PerRank, StateNote, StoredTensor

ARGS = "args"
OPTIMIZER = "optimizer"
NOT_READ = "Megatron-LM's optimizer keeps buffers and copies by rank, which are not read"
MAX_ITEMS = 10_000
"""Length above which a list among the arguments is left out. Lists of data paths have some hundreds."""

Extra = dict[Path, Leaf]


def arguments(leaf: Leaf) -> dict[str, Leaf]:
    """Return name -> value of the plain arguments. Dtypes, enums and other objects are left out."""
    state = leaf.state if isinstance(leaf, Opaque) and leaf.name == "Namespace" else leaf
    if not isinstance(state, dict):
        return {}
    return {k: v for k, v in state.items() if isinstance(k, str) and _is_plain(v)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= MAX_ITEMS and all(_is_plain(item) for item in value)
    return value is None or type(value) in (str, int, float, bool)


def number(args: Mapping[str, object], name: str) -> int | None:
    """Return a size among the arguments; None if it is missing or no positive integer."""
    value = args.get(name)
    return value if type(value) is int and value > 0 else None


def other_values(leaves: Mapping[Path, Leaf]) -> tuple[Extra, list[str]]:
    """Return the leaves of the index for the values beside the weights, and the keys left out.

    The optimizer becomes a note that its state is not read.
    """
    roots: dict[str, Extra] = {}
    for path, leaf in leaves.items():
        roots.setdefault(str(path[0]), {})[path[1:]] = leaf
    extra: Extra = {}
    left = []
    for key, inside in roots.items():
        if key == ARGS:
            extra["extra", ARGS] = {**arguments(inside.get(()))}
        elif key == OPTIMIZER:
            extra[OPTIMIZER, ARGS] = not_read()
        elif any(map(_stays, inside.values())):
            left.append(key)
        else:
            extra["extra", key] = nest(inside.items())
    return extra, left


def not_read() -> StateNote:
    """Return the note that stands in place of the optimizer's state."""
    return StateNote(refused=NOT_READ)


def _stays(leaf: Leaf) -> bool:
    """Return True if a leaf holds a tensor, an object of a class, or a value per rank."""
    if isinstance(leaf, Mapping):
        return any(map(_stays, (*leaf, *leaf.values())))
    if isinstance(leaf, list | tuple | set | frozenset):
        return any(map(_stays, leaf))
    return isinstance(leaf, Opaque | PerRank | StoredTensor) or holds_tensor(leaf)
