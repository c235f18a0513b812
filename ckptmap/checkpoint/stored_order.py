"""Whether a checkpoint lists its tensors in the order of the model's modules.

Only that order tells which part of a flat parameter is which tensor. A wrong one gives files of the
right sizes with wrong values, so only containers count that keep the order, as `Index.keeps_order`
says: torch.save keeps that of the dict, DCP that of rank 0's dict; safetensors sorts each file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path as FilePath

from ckptmap.protocols import Group, Index
from ckptmap.sharding.reference_model import MANIFEST, is_alphabetical


def in_order(path: str, index: Index, groups: Mapping[str, Group]) -> list[str]:
    """Return the tensors that are known to be listed in the order of modules.

    The list is empty if the container keeps no order, if the names are in no order that modules could
    have, or are sorted and nothing shows that the model's are, and for an output of ckptmap, which has the order of its source.
    """
    keeps_order = index.keeps_order
    ours = index.manifest is not None or (FilePath(path) / MANIFEST).is_file()
    if keeps_order is None or ours:
        return []
    names = [fqn for fqn, group in groups.items() if any(map(keeps_order, group.parts.values()))]
    dtypes = [groups[fqn].info.dtype for fqn in names]
    if not is_traversal(names) or (
        is_alphabetical(names, dtypes) and not _lists_modules(index, names)
    ):
        return []
    return names


def _lists_modules(index: Index, names: Sequence[str]) -> bool:
    """Return whether the container lists the modules of these tensors beside them, in the same order.

    Sorting a state dict loses that list: sorted names with it are those of a model that has them so.
    """
    last = [name.rpartition(".")[2] for name in names]
    for path, modules in index.module_order().items() if index.module_order is not None else ():
        place = {module: number for number, module in enumerate(modules)}
        stored = [str(leaf[-1]) for leaf in index.leaves if leaf[:-1] == path]
        places = [place.get(name.rpartition(".")[0], -1) for name in stored]
        if [name.rpartition(".")[2] for name in stored] == last and -1 not in places:
            return places == sorted(places)
    return False


def is_traversal(names: Sequence[str]) -> bool:
    """Return whether `state_dict()` of a module could list the names in this order.

    It lists a module's own tensors before those of its submodules, and nothing of a module after
    the first tensor of the next one.
    """
    left: set[tuple[str, ...]] = set()
    at: list[str] = []
    for name in names:
        path = name.split(".")[:-1]
        common = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(at, path, strict=False))
        )
        if common == len(path) < len(at):
            return False
        left |= {tuple(at[: depth + 1]) for depth in range(common, len(at))}
        if any(tuple(path[: depth + 1]) in left for depth in range(common, len(path))):
            return False
        at = path
    return True
