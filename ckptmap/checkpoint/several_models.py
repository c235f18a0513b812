"""Checkpoints of several models: `ckptmap.save(path, {"policy": m, "value": v})` records their names.

policy.layers.0.weight, value.fc.weight  --source-root policy->  layers.0.weight
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.module_extra_state import extra_state_keys
from ckptmap.checkpoint.rename import renamed
from ckptmap.checkpoint.split_roles import EXTRA_KEY
from ckptmap.core.formatting import some
from ckptmap.core.printable import advised
from ckptmap.mapping.renaming import Renaming
from ckptmap.tensors import Leaf, Path

RECORD: Path = ("ckptmap", "models")
"""Where `ckptmap.save` records the names, among the extra values."""


def recorded(leaves: Mapping[Path, Leaf]) -> tuple[str, ...]:
    """Return the names of the models; () where one was saved, or somebody else saved them."""
    return _names(leaves.get((EXTRA_KEY, *RECORD)))


def recorded_in(ckpt: Checkpoint) -> tuple[str, ...]:
    """Return the names of the models of a checkpoint that was opened whole."""
    return _names(ckpt.plain.get(RECORD))


def _names(names: object) -> tuple[str, ...]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(names)


def one_of(ckpt: Checkpoint, name: str, names: tuple[str, ...]) -> Checkpoint:
    """Return the model of this name alone: its weights, their optimizer state, its extra state, by its
    own FQNs. What else a run saved (step, scheduler) stays."""
    head = f"{name}."

    def of_another(fqn: str) -> bool:
        return not fqn.startswith(head)

    values = {**ckpt.plain, **ckpt.other}
    places, keys = extra_state_keys(values, ckpt.roles.model_root)
    gone = {path for path, at in places.items() if of_another(keys[str(path[at])])}
    left = {fqn for fqn in ckpt if of_another(fqn)}
    alone = replace(
        ckpt,
        groups=ckpt.groups.without(left),
        names={fqn: key for fqn, key in ckpt.names.items() if fqn not in left},
        other={path: lazy for path, lazy in ckpt.other.items() if path not in gone},
        plain={p: value for p, value in ckpt.plain.items() if p not in gone and p != RECORD},
        notes=[*ckpt.notes, f"{name} is one of its models; not read: {_others(name, names)}"],
        ties={a: b for a, b in ckpt.ties.items() if a not in left and b not in left},
        untied={a: b for a, b in ckpt.untied.items() if a not in left and b not in left},
    )
    alone = renamed(alone, Renaming(strip_prefix=name))
    return replace(alone, optimizer_reader=ckpt.optimizer_reader.below(name, alone.infos()))


def _others(name: str, names: tuple[str, ...]) -> str:
    return some([other for other in names if other != name]) or "none"


def note(names: tuple[str, ...]) -> str:
    """Return what a reader should be told of a checkpoint of several models."""
    return f"it holds {len(names)} models, {some(names)}: {advised(source_root=names[0])} takes one of them"
