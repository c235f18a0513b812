"""Read a directory of torch.save files, one per rank: `model_world_size_4_rank_0.pt`, `rank0.pt`, ...

Programs that call `torch.save(model.state_dict(), f"..._rank_{rank}.pt")` on each rank write them;
FSDP2, FSDP1 and verl do. Files whose names differ in the rank only form a group: the weights, the
optimizer, other state. The values that the ranks hold under one key are one leaf of the index. A
layout (`dtensor_layout`, `sharded_tensor_layout`) joins the values into one tensor later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path as FilePath

from ckptmap.core.formatting import counted, some
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.rank_trees import RankReader, RankSet, RankTree
from ckptmap.formats.rank_files.stated_ranks import stated_world
from ckptmap.formats.zip.reader import is_zip
from ckptmap.protocols import Index, Place, in_saved_order
from ckptmap.protocols.file_systems import Mounts
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
    """Reads the files of all ranks of one save. It refuses an incomplete set."""

    name = "rank-files"

    def claims(self, place: Place) -> bool:
        """Return True for a directory with a zip file that has a rank in its name."""
        if not place.is_dir:
            return False
        directory = FilePath(place.path)
        return any(
            is_zip(directory / name, place.mounts) for name in place.names if _NAME.fullmatch(name)
        )

    def index(self, place: Place) -> Index:
        """Return the leaves of all ranks, those of the optimizer below `optimizer`.

        Raise SourceError CKM110 if ranks are missing or belong to several saves, CKM205 if it is unclear
        which files hold the weights, and the errors of `torch_save.reader.load`.
        """
        groups = _groups(place)
        leaves: dict[Path, Leaf] = {}
        units: dict[Path, tuple[str, ...]] = {}
        files: list[str] = []
        world = 1
        for prefix, group in _by_prefix(groups, place.path).items():
            ranks = _load_all(group, place.mounts)
            world = max(world, len(ranks.trees))
            files += [group.files[rank] for rank in sorted(group.files)]
            leaves.update({(*prefix, *path): leaf for path, leaf in ranks.merged().items()})
            units.update({(*prefix, *path): names for path, names in ranks.units.items()})
        # The one file of DeepSpeed's ZeRO stage 0 and the like is a whole model as torch.save writes it.
        whole = world == 1 and not any("world_size" in group.name for group in groups)
        return Index(
            self.name, leaves, tuple(files), world=world, units=units, keeps_order=in_saved_order,
            setup="full" if whole else "",
        )  # fmt: skip


def _groups(place: Place) -> list[_Group]:
    directory = FilePath(place.path).absolute()
    groups: dict[str, dict[int, str]] = {}
    for name in place.names:
        match = _NAME.fullmatch(name)
        path = directory / name
        if match is None or not is_zip(path, place.mounts):
            continue
        files = groups.setdefault(f"{match['stem']}rank*{match['rest']}", {})
        rank = int(match["rank"])
        if rank in files:
            raise SourceError(
                "CKM110",
                f"{path}: expected one file of rank {rank}, found {FilePath(files[rank]).name} too",
                "move the stale one to another directory",
            )
        files[rank] = str(path)
    return [_Group(name, files) for name, files in groups.items()]


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
                f"{where}: expected one save, found rank files of several saves: {placed[prefix].name} and"
                f" {group.name}",
                "move each save into a directory of its own",
            )
        placed[prefix] = group
    if () not in placed:
        names = some([group.name for group in groups])
        raise SourceError(
            "CKM205",
            f"{where}: expected rank files with `model` in their names, found {names}",
            "rename the files of the weights to model_rank_0.pt, model_rank_1.pt, ..., or move them to a"
            " directory of their own",
        )
    return placed


def _title(group: _Group) -> str:
    """Return the part of a group's name before the rank and the world size.

    `extra_state_world_size_2_rank*.pt` -> `extra_state`
    """
    stem = re.split(r"rank\*|world[_-]?size", group.name, flags=re.IGNORECASE)[0]
    return stem.strip("._-") or group.name


def _load_all(group: _Group, mounts: Mounts) -> RankSet:
    """Return the trees of all ranks. Raise SourceError CKM110 if the set is not complete."""
    files, reader = Files(mounts=mounts), RankReader()
    try:
        trees = {rank: reader.read(files, group.files[rank]) for rank in sorted(group.files)}
    finally:
        files.close()
    _check_ranks(group, trees)
    return RankSet([trees[rank] for rank in range(len(trees))])


def _check_ranks(group: _Group, trees: Mapping[int, RankTree]) -> None:
    """Raise SourceError CKM110 unless the ranks are 0..N-1.

    N is the world size in the file names, else the one that the tensors state.
    """
    named = _WORLD.search(group.name)
    mesh, is_all = stated_world(group.files, trees)
    world = mesh if is_all else max(mesh, max(trees) + 1)
    if named:
        world = int(named[1] or named[2])
    if mesh and (mesh != world if is_all else mesh > world):
        raise SourceError(
            "CKM110",
            f"{group.name}: expected tensors of {counted(world, 'rank')} by its name, found tensors of {counted(mesh, 'rank')}",
            "copy the files of one save into a directory of their own",
        )
    count = world - sum(rank < world for rank in trees)
    if count:
        missing = list(islice((rank for rank in range(world) if rank not in trees), 4))
        names = ", ".join(group.name.replace("*", _like(group, rank), 1) for rank in missing)
        if count > len(missing):
            names += ", ..."
        raise SourceError(
            "CKM110",
            f"{FilePath(next(iter(group.files.values()))).parent}: rank {missing[0]} of {world} is "
            f"missing ({names})",
            f"copy {counted(count, 'missing rank file')} into this directory",
        )
    extra = [rank for rank in trees if rank >= world]
    if extra:
        raise SourceError(
            "CKM110",
            f"{group.files[extra[0]]}: rank {extra[0]}, expected ranks below {world}",
            "move files that an earlier save of more ranks left here to another directory",
        )


def _like(group: _Group, rank: int) -> str:
    """Return the rank as the file names of the group write it: `_3`, `-03`."""
    sample, name = FilePath(next(iter(group.files.values()))).name, group.name
    stem = name.index("*")
    written = re.match(r"([_-]?)(\d+)", sample[stem:])
    if written is None:
        return str(rank)
    width = len(written[2]) if written[2].startswith("0") else 0
    return f"{written[1]}{rank:0{width}d}"
