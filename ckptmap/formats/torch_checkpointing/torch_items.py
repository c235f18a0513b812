"""Read an item that each rank saved with torch.save, and compare its tensors with `metadata.pkl`.

The DTensors in the files state their own mesh and placements, and `rank_files` joins them by these. What
`metadata.pkl` says of them must be the same: else it belongs to another save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptmap.core.state_paths import PER_RANK
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.rank_trees import Parsed, RankReader, RankSet, RankTree
from ckptmap.formats.rank_files.stated_ranks import stated_world
from ckptmap.formats.torch_checkpointing.item_files import ItemFiles
from ckptmap.formats.torch_checkpointing.metadata import METADATA, Sharding
from ckptmap.formats.torch_save.reader import ReadTensor
from ckptmap.sharding.dtensor_spec import Cutting, is_dtensor, read_placed
from ckptmap.storage.files import Files
from ckptmap.tensors import Leaf, Opaque, Path, PerRank, StoredTensor

ROLES = ("model", "optimizer")
"""Items of which each rank holds its part, also where a rank has no tensor in it."""


class TorchItem(NamedTuple):
    """The trees of an item by rank, and how many ranks its tensors state (0: they state none)."""

    item: ItemFiles
    trees: Mapping[int, RankTree]
    world: int

    def leaves(self) -> dict[Path, Leaf]:
        """Return path -> leaf. The values of an item that each rank has for itself, such as a data loader's,
        lie where `ckptmap.save` keeps those: ("extra", "per_rank", "rank1", "dataloader", ...).

        Raise SourceError CKM109 if `metadata.pkl` says something else.
        """
        if self.item.stated is not None:
            _compare(self)
        ranks = RankSet([self.trees[rank] for rank in sorted(self.trees)])
        merged = {path: _of_one_rank(leaf, ranks, path) for path, leaf in ranks.merged().items()}
        if not self._is_shared() and any(map(_differs, merged.values())):
            return {
                ("extra", PER_RANK, f"rank{rank}", self.item.key, *path): tree.get(path)
                for rank, tree in sorted(self.trees.items())
                for path in tree.parsed.leaves
            }
        return {(self.item.key, *path): leaf for path, leaf in merged.items()}

    def _is_shared(self) -> bool:
        """Return whether the ranks hold parts or copies of one value, and not each a value of its own."""
        of_roles = self.item.key in ROLES or self.item.stated is not None
        return of_roles or any(tree.first(is_dtensor) for tree in self.trees.values())


def read_item(files: Files, item: ItemFiles) -> TorchItem:
    """Return the content of the files of an item. Raise SourceError as `rank_files.reader` does."""
    reader = RankReader()
    trees = {rank: reader.read(files, item.files[rank]) for rank in sorted(item.files)}
    stated, is_all = stated_world(item.files, trees)
    alone = len(trees) == 1 and not is_all  # one rank wrote it for all, and not as DTensors
    return TorchItem(item, trees, 0 if alone else stated)


def _differs(leaf: Leaf) -> bool:
    """Return whether the ranks have different values; of plain tensors the CRC-32s of their records tell."""
    if not isinstance(leaf, PerRank):
        return False
    tensors = [value for value in leaf.values if isinstance(value, ReadTensor)]
    views = {(t.info, t.start, t.records.crc32(f"data/{t.key}")) for t in tensors}
    return len(tensors) < len(leaf.values) or len(views) > 1


def _of_one_rank(leaf: Leaf, ranks: RankSet, path: Path) -> Leaf:
    """Return the value of the only rank that has one at a path, as `dp_rank_1` of a data loader is; else the
    leaf itself."""
    if not isinstance(leaf, PerRank) or len(ranks.kinds) == 1:
        return leaf
    holders = [members for parsed, members in ranks.kinds if path in parsed.leaves]
    only = holders[0][0] if len(holders) == 1 and len(holders[0]) == 1 else None
    if only is None or is_dtensor(ranks.trees[only].get(path)):
        return leaf
    return ranks.trees[only].get(path)


def _compare(read: TorchItem) -> None:
    """Raise SourceError CKM109 unless the files hold the tensors that `metadata.pkl` lists, cut as it says."""
    stated = read.item.stated
    assert stated is not None
    kinds: dict[Parsed, list[int]] = {}
    for rank, tree in read.trees.items():
        kinds.setdefault(tree.parsed, []).append(rank)
    for parsed, ranks in kinds.items():
        for path, leaf in parsed.leaves.items():
            if isinstance(leaf, StoredTensor) or (
                isinstance(leaf, Opaque) and leaf.info is not None
            ):
                _compare_tensor(read, ranks[0], path, stated.tensors.get(path))
    for path, ways in stated.tensors.items():
        holders = [ranks for parsed, ranks in kinds.items() if path in parsed.leaves]
        if not holders and not _hides(next(iter(kinds)), path):
            raise _other_save(read.item, path, ways[0], "no such tensor")
        for way in ways if len(holders) < len(kinds) else ():
            held = {rank for ranks in holders for rank in ranks}
            lost = [rank for rank in way.mesh.places if rank not in held] if way.cuts else []
            if holders and lost:
                raise _other_save(read.item, path, way, f"none on rank {lost[0]}")


def _hides(parsed: Parsed, path: Path) -> bool:
    """Return whether the tensor lies in an object that stays one leaf, such as a deque."""
    return any(path[:depth] in parsed.leaves for depth in range(len(path)))


def _compare_tensor(
    read: TorchItem, rank: int, path: Path, ways: Sequence[Sharding] | None
) -> None:
    value = read.trees[rank].get(path)
    assert isinstance(value, StoredTensor | Opaque) and value.info is not None
    if ways is None:
        if is_dtensor(value) or rank == min(
            read.trees
        ):  # of plain tensors it lists those of rank 0 alone
            raise _other_save(read.item, path, None, f"{value.info} on rank {rank}")
        return
    way = next((way for way in ways if rank in way.mesh.places), None)
    if way is None:
        raise _other_save(read.item, path, ways[0], f"a part on rank {rank}")
    info, place = value.info, way.mesh.places[rank]
    cuts: tuple[Cutting, ...] = ()
    if is_dtensor(value):
        placed = read_placed(value, ".".join(map(str, path)))
        cuts, place = placed.cuts, placed.coordinate
    elif isinstance(value, Opaque):  # a subclass: its dtype is that of its own parts
        info = way.info if info.shape == way.info.shape else info
    if info != way.info or not _agree(cuts, way.cuts) or place != way.mesh.places[rank]:
        raise _other_save(
            read.item, path, way, f"{info} cut over dims {_dims(cuts)} at {place}, on rank {rank}"
        )


def _agree(cuts: Sequence[Cutting], stated: Sequence[Cutting]) -> bool:
    """Return whether placements are those that `metadata.pkl` states. That of 0.1.0 has no split factors."""
    pairs = list(zip(sorted(cuts), sorted(stated), strict=False))
    return len(cuts) == len(stated) and all(
        a[:2] == b[:2] and (b.split in (1, a.split)) for a, b in pairs
    )


def _dims(cuts: Sequence[Cutting]) -> list[int]:
    return [cut.dim for cut in cuts]


def _other_save(item: ItemFiles, path: Path, way: Sharding | None, found: str) -> SourceError:
    expected = (
        f"{way.info} cut over dims {_dims(way.cuts)} of mesh {list(way.mesh.shape)}"
        if way
        else "none"
    )
    return SourceError(
        "CKM109",
        f"{next(iter(item.files.values()))}: {METADATA} and the files are of different saves:"
        f" tensor {'.'.join(map(str, path))!r}: {METADATA} lists {expected}, found {found}",
        f"copy {METADATA} and the files of one save into a directory of their own",
    )
