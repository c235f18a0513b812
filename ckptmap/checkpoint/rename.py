"""Rename the weights of a checkpoint by prefix and by pattern: `student.fc.weight` -> `fc.weight`.

Optimizer state, extra state of modules and ties follow their weights; the parts of a quantized weight
follow its FQN. No tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.module_extra_state import extra_state_keys
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.state_paths import join
from ckptmap.errors import PlanError
from ckptmap.mapping.renaming import Renaming
from ckptmap.tensors import Path

_Leaf = TypeVar("_Leaf")


def renamed(ckpt: Checkpoint, renaming: Renaming, lenient: bool = False) -> Checkpoint:
    """Return the checkpoint under the new names; the checkpoint itself where nothing is renamed.

    lenient  whether a prefix or a pattern may match no name: it is of a checkpoint of which this is a part

    Raises PlanError CKM618 where a prefix or pattern matches no name, or a name could not be read
    back, CKM114 where two names would become one.
    """
    if not renaming:
        return ckpt
    assert ckpt.translation is None, "prefixes and patterns come before naming schemes"
    beside = {**ckpt.plain, **ckpt.other}
    places, states = extra_state_keys(beside, ckpt.roles.model_root)
    with paused_gc():
        keys = [*ckpt, *states.values()]
        if lenient:
            names = dict(zip(keys, map(renaming.lenient({}), keys), strict=True))
            renaming.require_distinct(names, ckpt.shown)
        else:
            names = renaming.names(keys, ckpt.shown)
        new_path = {
            path: (*path[:at], names[states[str(path[at])]], *path[at + 1 :])
            for path, at in places.items()
        }
        return replace(
            ckpt,
            groups=ckpt.groups.renamed(names),
            names={names[fqn]: ckpt.names.get(fqn, fqn) for fqn in ckpt},
            optimizer_reader=ckpt.optimizer_reader.renamed(
                _of_state(names, renaming, ckpt.shown), {fqn: names[fqn] for fqn in ckpt}
            ),
            other={
                path: lazy.named(join(path)) if path not in ckpt.other else lazy
                for path, lazy in _at(new_path, ckpt.other).items()
            },
            plain=_at(new_path, ckpt.plain),
            ties={names.get(a, a): names.get(b, b) for a, b in ckpt.ties.items()},
            untied={names.get(a, a): names.get(b, b) for a, b in ckpt.untied.items()},
            renamings=(*ckpt.renamings, renaming),
        )


def renamed_like_output(ckpt: Checkpoint, records: object, weights: Collection[str]) -> Checkpoint:
    """Return `ckpt` renamed as an output was; `records` is what its manifest says, None: nothing.

    It stays as it is if it has the output's `weights` by name already: it was opened with the same
    prefixes, or is the output of another conversion.
    """
    if records is None:
        return ckpt
    result = ckpt
    try:
        for record in records if isinstance(records, list) else [records]:
            result = renamed(result, Renaming.recorded(record))
    except PlanError:
        if not all(name in ckpt for name in weights):
            raise
        return ckpt
    return result


def _at(new_path: Mapping[Path, Path], leaves: Mapping[Path, _Leaf]) -> dict[Path, _Leaf]:
    return {new_path.get(path, path): leaf for path, leaf in leaves.items()}


def _of_state(
    names: Mapping[str, str], renaming: Renaming, where: str
) -> Callable[[Collection[str]], Mapping[str, str]]:
    """Return what names the parameters of optimizer state, those that are no weights by the same rules."""
    name = renaming.lenient(names)

    def of_keys(keys: Collection[str]) -> dict[str, str]:
        named = {key: name(key) for key in keys}
        renaming.require_distinct(named, f"{where}: optimizer state")
        return named

    return of_keys
