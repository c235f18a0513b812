"""Read a directory of torch.save files, one per rank: `model_world_size_4_rank_0.pt`, `rank0.pt`, ...

Files whose names differ in the rank only form a group: the weights, the optimizer, other state.
The values that the ranks hold under one key are one leaf of the index. A layout joins the values
into one tensor later.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path as FilePath

from ckptmap.core.formatting import counted
from ckptmap.core.gc_pause import paused_gc
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.rank_trees import RankReader, RankSet, RankTree
from ckptmap.formats.zip.reader import is_zip
from ckptmap.protocols import Index, Place, in_saved_order
from ckptmap.sharding.dtensor_spec import is_dtensor, mesh_ranks, meshes_apart
from ckptmap.sharding.sharded_tensor_spec import check_writer, is_sharded
from ckptmap.storage.files import Files
from ckptmap.tensors import Leaf, Path

_NAME = re.compile(r"(?P<stem>.*?)rank[_-]?(?P<rank>\d+)(?P<rest>\D.*|)", re.IGNORECASE)
_WORLD = re.compile(r"world[_-]?size[_-]?(\d+)|_of_(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class _Group:
    """The files of one role: `name` is the file name with `*` for the rank, `files[rank]` a path."""

    name: str
    files: Mapping[int, str]

    @property
    def prefix(self) -> Path:
        """Return the path of the leaves: weights at the root, the optimizer and others below a key."""
        lower = self.name.lower()
        if "optim" in lower:
            return ("optimizer",)
        return () if "model" in lower else ("extra",)


class RankFiles:
    """Reads the files of all ranks of one save; refuses a set that is not complete."""

    name = "rank-files"

    def claims(self, place: Place) -> bool:
        """Return True for a directory with a zip file that has a rank in its name."""
        if not place.is_dir:
            return False
        directory = FilePath(place.path)
        return any(is_zip(directory / name) for name in place.names if _NAME.fullmatch(name))

    def index(self, place: Place) -> Index:
        """Return the leaves of all ranks. Raise SourceError CKM110 if ranks are missing or belong to
        several saves, and the errors of reading a single torch.save file."""
        with paused_gc():
            return self._index(place)

    def _index(self, place: Place) -> Index:
        groups = _groups(place)
        leaves: dict[Path, Leaf] = {}
        units: dict[Path, tuple[str, ...]] = {}
        files: list[str] = []
        world = 1
        for prefix, group in _by_prefix(groups, place.path).items():
            ranks = _load_all(group)
            world = max(world, len(ranks.trees))
            files += [group.files[rank] for rank in sorted(group.files)]
            leaves.update({(*prefix, *path): leaf for path, leaf in ranks.merged().items()})
            units.update({(*prefix, *path): names for path, names in ranks.units.items()})
        return Index(
            self.name, leaves, tuple(files), world=world, units=units, keeps_order=in_saved_order
        )


def _groups(place: Place) -> list[_Group]:
    directory = FilePath(place.path).absolute()
    found: dict[str, dict[int, str]] = {}
    for name in place.names:
        match = _NAME.fullmatch(name)
        path = directory / name
        if match is None or not is_zip(path):
            continue
        files = found.setdefault(f"{match['stem']}rank*{match['rest']}", {})
        rank = int(match["rank"])
        if rank in files:
            raise SourceError(
                "CKM110",
                f"{path}: rank {rank} is there twice, also as {FilePath(files[rank]).name}",
                "remove the stale one",
            )
        files[rank] = str(path)
    return [_Group(name, files) for name, files in found.items()]


def _by_prefix(groups: Sequence[_Group], where: str) -> Mapping[Path, _Group]:
    """Return the groups by the path of their leaves; a single group holds the weights."""
    if len(groups) == 1:
        return {(): groups[0]}
    placed: dict[Path, _Group] = {}
    for group in sorted(groups, key=lambda group: group.prefix):
        prefix = group.prefix if group.prefix not in (("extra",),) else ("extra", _title(group))
        if prefix in placed:
            raise SourceError(
                "CKM110",
                f"{where}: rank files of several saves: {placed[prefix].name} and {group.name}",
                "move each save into a directory of its own",
            )
        placed[prefix] = group
    if () not in placed:
        names = ", ".join(group.name for group in groups)
        raise SourceError(
            "CKM205",
            f"{where}: which rank files hold the weights is unclear: {names}",
            "name them model_...rank_R, or keep them alone in a directory",
        )
    return placed


def _title(group: _Group) -> str:
    """Return the part of a group's name before the rank and the world size.

    `extra_state_world_size_2_rank*.pt` -> `extra_state`
    """
    stem = re.split(r"rank\*|world[_-]?size", group.name, flags=re.IGNORECASE)[0]
    return stem.strip("._-") or group.name


def _load_all(group: _Group) -> RankSet:
    """Return the trees of all ranks. Raise SourceError CKM110 if the set is not complete."""
    files, reader = Files(), RankReader()
    try:
        trees = {rank: reader.read(files, group.files[rank]) for rank in sorted(group.files)}
    finally:
        files.close()
    _check_ranks(group, trees)
    return RankSet([trees[rank] for rank in range(len(trees))])


def _check_ranks(group: _Group, trees: Mapping[int, RankTree]) -> None:
    """Raise SourceError CKM110 unless the ranks are 0..N-1.

    N is the world size in the file names, else the one that the tensors state."""
    said = _WORLD.search(group.name)
    mesh, is_all = _ranks_inside(group, trees)
    world = mesh if is_all else max(mesh, max(trees) + 1)
    if said:
        world = int(said[1] or said[2])
    if mesh and (mesh != world if is_all else mesh > world):
        raise SourceError(
            "CKM110",
            f"{group.name}: its tensors are of {mesh} ranks, its name says {world}",
            "these files are not of one save",
        )
    count = world - sum(rank < world for rank in trees)
    if count:
        missing = list(islice((rank for rank in range(world) if rank not in trees), 4))
        names = ", ".join(group.name.replace("*", _like(group, rank), 1) for rank in missing)
        raise SourceError(
            "CKM110",
            f"{FilePath(next(iter(group.files.values()))).parent}: rank {missing[0]} of {world} is "
            f"missing ({names}{', ...' if count > 4 else ''})",
            f"copy {counted(count, 'missing rank file')} here",
        )
    extra = [rank for rank in trees if rank >= world]
    if extra:
        raise SourceError(
            "CKM110",
            f"{group.files[extra[0]]}: rank {extra[0]}, expected ranks below {world}",
            "remove files that an earlier save of more ranks left here",
        )


def _ranks_inside(group: _Group, trees: Mapping[int, RankTree]) -> tuple[int, bool]:
    """Return the world size that the tensors state (0 if they state none), and whether it is exact.

    Pipeline stages with a mesh each know their own ranks only. Then the number is a lower bound.
    """
    said: dict[int, int] = {}
    for rank, tree in trees.items():
        world = check_writer(tree.first(is_sharded), rank, group.files[rank])
        if world is not None:
            said.setdefault(world, rank)
    if len(said) > 1:
        (one, first), (other, second) = list(said.items())[:2]
        raise SourceError(
            "CKM110",
            f"{group.files[second]}: is of a save by {other} ranks, rank {first}'s file by {one}",
            "copy the files of one save into a directory of their own",
        )
    if said:
        return next(iter(said)), True
    found = {rank: mesh_ranks(tree.first(is_dtensor)) for rank, tree in trees.items()}
    meshes = _stages(found)
    if len(meshes) > 1 or (meshes and not all(found.values())):
        return max(map(max, meshes)) + 1, False
    mesh = len(next(filter(None, found.values()), ()))
    return mesh, mesh > 0


def _stages(found: Mapping[int, tuple[int, ...]]) -> Collection[tuple[int, ...]]:
    """Return the distinct meshes of the ranks.

    Return none if a rank is not in its own mesh, or if two meshes share a rank."""
    meshes: dict[tuple[int, ...], set[int]] = {}
    for rank, ranks in found.items():
        known = not ranks or ranks in meshes
        if (ranks and rank not in ranks) or not (known or meshes_apart(ranks, meshes.values())):
            return ()
        if not known:
            meshes[ranks] = set(ranks)
    return meshes


def _like(group: _Group, rank: int) -> str:
    """Return the rank as the file names of the group write it: `_3`, `-03`."""
    sample, name = FilePath(next(iter(group.files.values()))).name, group.name
    stem = name.index("*")
    written = re.match(r"([_-]?)(\d+)", sample[stem:])
    if written is None:
        return str(rank)
    width = len(written[2]) if written[2].startswith("0") else 0
    return f"{written[1]}{rank:0{width}d}"
