"""Download remote source files, whole and verified, before the units of work that read them.

    units -> batches of units that read the same files, each after its files are downloaded

Usually all files are downloaded first, and all units are one batch. With a `staging` directory,
which keeps disk usage low, units are sorted by the files that they read, and a file is deleted as
soon as no unit needs it: one shard is on disk at a time, or as many as one tensor is spread over.
Nothing is downloaded for units that an earlier run has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

from ckptmap.core.rearranged_tensors import ZEROS, Rearranged
from ckptmap.planning.file_plan import Compare, Encode, FilePlan
from ckptmap.protocols.file_systems import FileSystem
from ckptmap.storage.files import Files, verified_copies
from ckptmap.tensors import Box, StoredTensor


class Unit(Protocol):
    """A unit of work that reads some files; one with the name "" is repeated by every run."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Callable[[], Iterable[str]]: ...


U = TypeVar("U", bound=Unit)
Needs = frozenset[str]


def batches(
    files: Files, units: Iterator[U], done: Collection[str], staging: Path | None
) -> Iterator[Iterator[U]]:
    """Yield the units in batches, each when the files that it reads are on local disk.

    Local sources need no fetching: then all units are one batch, in their order. Raises RunError
    CKM702 to 710.
    """
    if not files.mounts:
        yield units
        return
    with verified_copies(files):
        todo = [(unit, _placeholders(files, unit.reads())) for unit in units]
        if staging is None:
            _fetch(files, _wanted(todo, done), None)
            yield iter([unit for unit, _ in todo])
        else:
            yield from _one_by_one(files, todo, done, staging)


def _one_by_one(
    files: Files, todo: Sequence[tuple[U, Needs]], done: Collection[str], staging: Path
) -> Iterator[Iterator[U]]:
    order = {file: i for i, file in enumerate(dict.fromkeys(f for _, n in todo for f in sorted(n)))}
    ordered = sorted(todo, key=lambda item: sorted(order[file] for file in item[1]))
    groups = [list(group) for _, group in groupby(ordered, key=lambda item: item[1])]
    last = {file: index for index, group in enumerate(groups) for file in group[0][1]}
    for index, group in enumerate(groups):
        _fetch(files, _wanted(group, done), staging)
        yield iter([unit for unit, _ in group])
        for file in group[0][1]:
            if last[file] == index:
                files.forget(file)
                _file_system(files, file).discard(file)


def _wanted(todo: Sequence[tuple[U, Needs]], done: Collection[str]) -> list[str]:
    files = (file for unit, needs in todo if unit.name not in done for file in sorted(needs))
    return list(dict.fromkeys(files))


def _fetch(files: Files, wanted: Sequence[str], staging: Path | None) -> None:
    for file_system, group in groupby(wanted, key=lambda file: _file_system(files, file)):
        file_system.fetch_all(list(group), staging)


def _placeholders(files: Files, reads: Iterable[str]) -> Needs:
    """Return those of the files that belong to a mounted remote file system."""
    return frozenset(file for file in reads if files.mounts.file_system_of(file) is not None)


def _file_system(files: Files, file: str) -> FileSystem:
    mounted = files.mounts.file_system_of(file)
    assert mounted is not None, f"{file}: no mounted file system answers for it"
    return mounted


# ------------------------------------------------------------------- what a unit reads


def read_by_copies(item: FilePlan, first: int, stop: int) -> Iterator[str]:
    """Yield the files that hold the bytes of slots `first` to `stop`."""
    for index in range(first, stop):
        source = item.sources[index]
        if source is not None:
            yield from _files_of(source, item.out.slots[index].box)


def read_by_encode(step: Encode) -> Iterator[str]:
    """Yield the files that hold the tensor to be encoded."""
    for stored in step.tensor.beneath:
        yield from _files_of(stored, Box.whole(stored.info.shape))


def read_by_compare(step: Compare) -> Iterator[str]:
    """Yield the files that hold a replica and the part of the tensor that it repeats."""
    yield step.replica.region.file
    yield from _files_of(step.tensor, step.replica.box)


def _files_of(stored: StoredTensor, box: Box) -> Iterator[str]:
    """Yield the files that hold a box; for a rearranged tensor, all of its files."""
    if isinstance(stored, Rearranged):
        yield from (s.region.file for s in stored.regions if s.region.file != ZEROS)
    else:
        yield from (chunk.region.file for chunk in stored.near(box))
