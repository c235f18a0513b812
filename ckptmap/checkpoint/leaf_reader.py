"""Read the leaves that are not weights: as a lazy tensor or a plain value, or refuse them.

A `LeafReader` has no reference to the Checkpoint that it is made for. Without a cycle, a checkpoint
that nobody refers to is freed at once, and its files are closed. Python's garbage collector would
find a cycle of such old objects very late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptmap.checkpoint.group_parts import RefusedLeaf, group_parts
from ckptmap.checkpoint.module_extra_state import as_buffer
from ckptmap.checkpoint.split_roles import MODEL_KEYS, is_tensor
from ckptmap.core.state_paths import (
    MAX_DEPTH,
    by_rank,
    described,
    hides_tensor,
    is_endless,
    join,
    opaques,
)
from ckptmap.optim.state import REFUSED
from ckptmap.protocols import Group
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Leaf, Path, StoredTensor


@dataclass(frozen=True, eq=False)
class LeafReader:
    """Reads leaves of the checkpoint `where`; adds to `refused` what no plan can carry.

    model_root      the path of the dict of the weights
    optimizer_root  the path of the dict of optimizer state, put before keys of what is refused
    """

    where: str
    files: Files
    refused: list[RefusedLeaf]
    model_root: Path
    optimizer_root: Path

    def tensor(self, path: Path, leaf: Leaf) -> LazyTensor | None:
        """Return a tensor outside the weights; None: it is refused."""
        groups = group_parts(
            {path: leaf}, {}, (), self.where, self.refused, {}, self.files.mounts
        ).values()
        return next((LazyTensor(group.fqn, group, self.files) for group in groups), None)

    def plain(self, leaves: Mapping[Path, Leaf], root: Path = ()) -> Iterator[tuple[Path, object]]:
        """Yield the plain values by path; `root` is put before the keys of what is refused."""
        for path, leaf in leaves.items():
            inert_buffer = as_buffer(path, leaf)
            if inert_buffer is not None:
                yield path, inert_buffer
                continue
            if any(map(is_endless, by_rank(leaf))):
                reason = f"a value that holds itself, nests deeper than {MAX_DEPTH}, or repeats without end"
                self._refuse(path, leaf, root, reason, droppable=not hides_tensor(leaf))
                continue
            if isinstance(leaf, StoredTensor):
                continue
            foreign = next(opaques(leaf), None)
            if foreign is None:
                if not is_tensor(leaf):
                    yield path, leaf
                continue
            # An object with tensors in it, such as a module among Lightning's hyper-parameters, is
            # left behind by its key as they would be; in the optimizer's state it is a moment.
            droppable = not root or not hides_tensor(foreign)
            self._refuse(path, leaf, root, described(foreign), droppable)

    def _refuse(self, path: Path, leaf: Leaf, root: Path, reason: str, droppable: bool) -> None:
        whole_model = len(path) == 1 and hides_tensor(leaf)
        place = None if root or whole_model or self._is_named_as_weight(path) else path
        self.refused.append(
            RefusedLeaf(
                join((*root, *path)), reason, droppable, place=place, of_optimizer=bool(root)
            )
        )

    def _is_named_as_weight(self, path: Path) -> bool:
        """Return whether an object at this path could be a weight, or the model, in a form that is not known: on
        the meta device, in a class of its own, or pickled whole beside its average."""
        depth = len(self.model_root)
        beside_weights = path[:depth] == self.model_root if depth else len(path) == 1
        return beside_weights or path[0] in MODEL_KEYS

    def optimizer(self, path: Path, leaf: Leaf) -> object:
        """Return a leaf of optimizer state as LazyTensor or plain value, or REFUSED."""
        if isinstance(leaf, Group):
            return LazyTensor(leaf.fqn, leaf, self.files)
        if is_tensor(leaf):
            before = len(self.refused)
            lazy = self.tensor(path, leaf)
            self.refused[before:] = [
                replace(item, of_optimizer=True) for item in self.refused[before:]
            ]
            return lazy or REFUSED
        values = self.plain({path: leaf}, self.optimizer_root)
        return next((value for _, value in values), REFUSED)
