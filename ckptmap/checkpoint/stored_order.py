"""Does a checkpoint list its tensors in the order of the model's modules?

Flat parameters are told apart by that order alone: a wrong one gives files of the right sizes with
the wrong values, so only what keeps the order counts: `Index.keeps_order` says of what. torch.save keeps
that of a dict, DCP that of rank 0's; safetensors are sorted, file by file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path as FilePath

from ckptmap.protocols import Group, Index
from ckptmap.sharding.reference_model import MANIFEST, is_alphabetical


def in_order(path: str, index: Index, groups: Mapping[str, Group]) -> list[str]:
    """The tensors that are known to be listed in the order of modules; none where the container
    keeps no order, where the names are sorted or could be those of no modules in order, and of what
    we made ourselves, who keep what the source had."""
    keeps_order = index.keeps_order
    ours = index.manifest is not None or (FilePath(path) / MANIFEST).is_file()
    if keeps_order is None or ours:
        return []
    names = [fqn for fqn, group in groups.items() if any(map(keeps_order, group.parts.values()))]
    dtypes = [groups[fqn].info.dtype for fqn in names]
    return names if is_traversal(names) and not is_alphabetical(names, dtypes) else []


def is_traversal(names: Sequence[str]) -> bool:
    """Could a module's `state_dict` list them so: a module's own tensors before those of modules
    inside it, and nothing of a module after what comes behind it."""
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
