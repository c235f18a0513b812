"""Take the leaves from a dict that is one item, as `DefaultSavePlanner(flatten_state_dict=False)` saves it.

torch stores such a dict once, that of one rank. Tensors in it that are cut over ranks, DTensors and
ShardedTensors, are there with the part of this rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap import registry
from ckptmap.core.state_tree import flatten
from ckptmap.errors import SourceError
from ckptmap.tensors import Leaf, Opaque, Path


def leaves_of_item(path: Path, value: Leaf, nbytes: int, where: str) -> Mapping[Path, Leaf]:
    """Return the leaves of the dict at `path`, which is an item of `nbytes`.

    Raise SourceError CKM112 for a tensor of several ranks.
    """
    leaves = {}
    for below, leaf in flatten(value, f"{where}: {'.'.join(map(str, path))!r}", nbytes).items():
        leaves[*path, *below] = leaf
        if isinstance(leaf, Opaque):
            _check_whole(leaf, f"{where}: {'.'.join(map(str, (*path, *below)))}")
    return leaves


def _check_whole(leaf: Opaque, name: str) -> None:
    try:
        for layout in registry.layouts():
            layout.join((leaf,), name)
    except SourceError as error:
        if error.code != "CKM110":
            raise
        raise SourceError(
            "CKM112",
            f"{name}: has the part of one rank only: with flatten_state_dict=False torch saved the dict"
            " around it once, not the parts of the other ranks",
            "save it again without flatten_state_dict=False; the other parts are in no file",
        ) from error
