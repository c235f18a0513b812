"""Read a framework's directory, which holds several checkpoints, as one checkpoint.

The directory's files or folders, its members, are checkpoints of their own: weights, optimizer
state, schedulers. The container that claims a member reads it; its leaves then go below `model`,
`optimizer` or `extra`.

    pytorch_model_fsdp_0/ {"model": {fqn: t}}            -> ("model", fqn): t
    optimizer_0/          {"optimizer": {"state": ...}}  -> ("optimizer", "state", ...): t
    scheduler.bin         {"last_epoch": 7, ...}         -> ("extra", "scheduler"): {...}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath

from ckptmap import registry
from ckptmap.core.formatting import counted, some
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.state_paths import walk_values
from ckptmap.core.state_tree import holds_tensor, nest
from ckptmap.errors import SourceError
from ckptmap.formats.detect import look, refuse_place
from ckptmap.protocols import Directory, Index, Member, Place
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.json_file import read_document
from ckptmap.tensors import Leaf, Opaque, Path, PerRank, StoredTensor

MAX_DOCUMENT_NBYTES = 256 << 20
"""A trainer's log of a long run is a few MB."""


@dataclass
class _Merge:
    """The Index as it grows, member by member."""

    mounts: Mounts
    leaves: dict[Path, Leaf] = field(default_factory=dict)
    records: dict[str, Mapping[str, object]] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread_files: list[str] = field(default_factory=list)
    file_of: dict[str, str] = field(default_factory=dict)
    units: dict[Path, Sequence[str]] = field(default_factory=dict)
    world: int = 1
    keeps_order: Callable[[StoredTensor], bool] | None = None
    """Of the weights."""
    first_of_role: dict[str, str] = field(default_factory=dict)
    """Role -> the name of the first member of that role."""


@paused_gc()  # here for all readers, which make many objects and no cycles
def index_of(place: Place) -> Index:
    """Return the Index that the framework of a directory makes, else that of the claiming container."""
    directory = registry.directory_for(place)
    if directory is not None:
        return merge_members(directory, place)
    container = registry.container_for(place)
    assert container is not None, f"{place.path}: no container claims it"
    return container.index(place)


def merge_members(directory: Directory, place: Place) -> Index:
    """Return one Index of all members.

    Raises SourceError where a member is malformed, CKM111 where two hold the same role.
    """
    members = directory.members(place)
    merge = _Merge(place.mounts, unread_files=list(members.unread_files))
    for member in members.members:
        if member.role == "extra":
            _add_extra(merge, member)
        elif member.role in merge.first_of_role:
            _add_copy(merge, member)
        else:
            _add_member(merge, member)
    for key, name in members.documents.items():
        file = FilePath(place.path).absolute() / name
        merge.leaves["extra", key] = read_document(file, place.mounts, MAX_DOCUMENT_NBYTES)
        merge.files[str(file)] = None
    for name in members.unread_files:
        file = FilePath(place.path).absolute() / name
        if file.is_file():
            merge.file_of.setdefault(file.stem, str(file))
    return Index(
        directory.name,
        merge.leaves,
        tuple(merge.files),
        records=merge.records,
        world=max(members.world, merge.world),
        notes=tuple(merge.notes),
        sidecar_dir=members.sidecar_dir,
        units=merge.units,
        unread_files=tuple(merge.unread_files),
        file_of=merge.file_of,
        keeps_order=merge.keeps_order,
    )


def unread_note(left: Sequence[str]) -> list[str]:
    """Return a note that names files and values that go nowhere; none if there are none."""
    return [f"left behind: {some(left)}"] if left else []


def _member_index(member: Member, mounts: Mounts) -> Index | None:
    """Return the member's own Index; None: no container knows it.

    Raises SourceError CKM104 for an empty file, which no framework writes.
    """
    place = look(FilePath(member.path).absolute(), mounts)
    if not place.is_dir and not place.head:
        raise SourceError(
            "CKM104",
            f"{member.path}: is empty (0 bytes): the save did not finish",
            "use an earlier checkpoint, or move this file away to go on without its values",
        )
    if member.names:
        place = replace(place, names=member.names)
    container = registry.container_for(place)
    return None if container is None else container.index(place)


def _required_index(merge: _Merge, member: Member) -> Index:
    index = _member_index(member, merge.mounts)
    if index is None:
        refusal = refuse_place(look(FilePath(member.path), merge.mounts), registry.knows)
        reason = refusal.message.removeprefix(f"{member.path}: ").removeprefix("is ")
        raise SourceError(
            "CKM111",
            f"{member.path}: expected the {member.role}'s part of a checkpoint, found {reason}",
            refusal.hint,
        )
    merge.files |= dict.fromkeys(index.files)
    merge.notes += [f"{_name(member)}: {note}" for note in index.notes]
    return index


def _add_member(merge: _Merge, member: Member) -> None:
    """Add weights or optimizer state; leaves outside the member's root become extra values."""
    index = _required_index(merge, member)
    merge.first_of_role[member.role] = _name(member)
    merge.world = max(merge.world, index.world)
    if member.role in ("model", "all"):
        merge.keeps_order = index.keeps_order
    if member.role == "all":
        merge.leaves |= index.leaves
        merge.records |= index.records
        merge.units |= index.units
        return
    for path, leaf in index.leaves.items():
        merge.leaves[_path_in_index(member, path)] = leaf
    depth = len(member.root)
    for path, units in index.units.items():
        if path[:depth] == member.root:
            merge.units[member.role, *path[depth:]] = units
    old = ".".join(map(str, member.root))
    for key, record in index.records.items():
        bare = key.removeprefix(old + ".") if old else key
        merge.records[f"{member.role}.{bare}"] = record


def _path_in_index(member: Member, path: Path) -> Path:
    depth = len(member.root)
    if path[:depth] == member.root and len(path) > depth:
        return (member.role, *path[depth:])
    return ("extra", _name(member), *path)


def _add_copy(merge: _Merge, member: Member) -> None:
    """Add a second copy of the weights as replicas: the run proves that tensors of one name are equal.

    Raises SourceError CKM111 for a second optimizer.
    """
    if member.role != "model":
        raise SourceError(
            "CKM111",
            f"{member.path}: the {member.role} is stored twice, also as {merge.first_of_role[member.role]}",
            "keep the one that belongs to this save, and move the other one away",
        )
    count = 0
    for path, leaf in _required_index(merge, member).leaves.items():
        target = _path_in_index(member, path)
        merged = _with_replica(merge.leaves.get(target), leaf)
        if merged is not None:
            count += 1
            merge.leaves[target] = merged
    merge.notes.append(
        f"the weights are there twice: {merge.first_of_role['model']} is used, and {counted(count, 'tensor')} of "
        f"{_name(member)} {'is' if count == 1 else 'are'} compared with it"
    )


def _with_replica(first: Leaf, second: Leaf) -> StoredTensor | None:
    """Return the first with the second as its replica; None: they are no tensors of one kind."""
    if not isinstance(first, StoredTensor) or not isinstance(second, StoredTensor):
        return None
    if first.info != second.info:
        return None
    replicas = (*first.replicas, *second.chunks)
    return StoredTensor(first.info, lambda: first.chunks, replicas, share=first.share)


def _add_extra(merge: _Merge, member: Member) -> None:
    """Add plain values, one leaf a key; values of foreign classes or that differ by rank stay unread."""
    index = _member_index(member, merge.mounts)
    if member.key and not member.names:
        merge.file_of[member.key] = str(FilePath(member.path).absolute())
    if index is None:
        merge.unread_files.append(_name(member))
        return
    merge.files |= dict.fromkeys(index.files)
    values = index.leaves.values()
    if not member.key or any(map(holds_tensor, values)) or any(map(_is_unreadable, values)):
        groups = _by_first(index.leaves)
    else:
        groups = {(): dict(index.leaves)}
    extra_root: Path = ("extra", member.key) if member.key else ("extra",)
    for head, leaves in groups.items():
        path_of_group = (*extra_root, *head)
        if path_of_group == ("extra",):
            merge.unread_files += [_name(member)] if any(leaves.values()) else []
        elif any(map(_is_unreadable, leaves.values())):
            inside = f"{head[0]} of " if head else ""
            merge.unread_files.append(inside + _name(member))
        elif any(map(holds_tensor, leaves.values())):
            merge.leaves |= {(*extra_root, *path): leaf for path, leaf in leaves.items()}
        else:
            values_below = [(path[len(head) :], leaf) for path, leaf in leaves.items()]
            merge.leaves[path_of_group] = nest(values_below)


def _by_first(leaves: Mapping[Path, Leaf]) -> dict[Path, dict[Path, Leaf]]:
    groups: dict[Path, dict[Path, Leaf]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[:1], {})[path] = leaf
    return groups


def _is_unreadable(leaf: Leaf) -> bool:
    """Return whether a leaf holds an object of a foreign class, or a value of its own for each rank."""
    return any(isinstance(value, Opaque | PerRank) for value in walk_values(leaf))


def _name(member: Member) -> str:
    """Return the name that the user sees: of a file, a directory, or the first of a set of files."""
    return some(member.names, 1) or FilePath(member.path).name
