"""Files of a framework's directory that go along whole: what they hold has a file of its own in the
output as well, so that no byte of it is read for anything but to be copied.

    accelerate's custom_checkpoint_0.pkl, random_states_1.pkl    -> accelerate's, the same bytes
    Trainer's scheduler.pt                                       -> accelerate's scheduler.bin
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.framework_members import left_behind
from ckptmap.core.state_paths import join
from ckptmap.protocols import CarriedFile, Setup
from ckptmap.storage.safe_names import blobs_of, inside
from ckptmap.storage.sidecar import Sidecar
from ckptmap.tensors import Path as LeafPath

FIRST = 0
"""The rank whose file tells what all ranks have in common."""


@dataclass
class CopiedFiles:
    """What goes along: files by their name in the output, and the keys of what they hold."""

    files: dict[str, CarriedFile] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Key -> the source's file."""
    notes: list[str] = field(default_factory=list)

    def holds(self, path: LeafPath) -> bool:
        """Is this extra value in one of them?"""
        return str(path[0]) in self.sources

    def said(self, ckpt: Checkpoint, carried: Collection[str]) -> list[str]:
        """The notes of the source, what goes along taken out of what is left behind; `carried` are
        the names of files that go along beside the weights."""
        names = {*(Path(file).name for file in self.sources.values()), *carried}
        left = [name for name in ckpt.index.unread_files if name.rpartition(" of ")[2] not in names]
        old = left_behind(ckpt.index.unread_files)
        notes = [note for note in ckpt.notes if note not in old]
        return [*notes, *left_behind(left), *self.notes]


def kept_whole(
    ckpt: Checkpoint, setup: Setup, world_size: int, dropped: Callable[[str], str | None]
) -> CopiedFiles:
    """`dropped` says of a key why the user wants it left; a file with such a key in it does not go
    along whole. Raises SourceError CKM116 where one is a link that leads out of the directory."""
    kept, filing = CopiedFiles(), setup.filing
    if filing is None:
        return kept
    inner = _keys(ckpt)
    ranks: dict[int, str] = {}
    for key, file in ckpt.index.file_of.items():
        name, rank = filing.file_of(key), filing.rank_of(key)
        if name is None or any(dropped(inside_it) for inside_it in inner.get(key, (key,))):
            continue
        if rank is not None:
            if setup.sharded and rank >= world_size:
                continue
            ranks[rank] = file
        directory = str(Path(file).parent)
        inside(directory, Path(file).name, directory, blobs_of(directory))
        kept.files[name], kept.sources[key] = Sidecar.at(file), file
    if setup.sharded and ckpt.world_size != world_size:
        for rank in range(world_size) if FIRST in ranks else ():
            made = None if rank in ranks else filing.new_rank(rank, ranks[FIRST])
            kept.files.update({} if made is None else dict([made]))
        kept.notes = filing.notes(kept.sources, ckpt.world_size, world_size)
    return kept


def _keys(ckpt: Checkpoint) -> Mapping[str, Sequence[str]]:
    """Key of an extra value -> all that is known in it."""
    found: dict[str, list[str]] = {}
    paths: Iterable[LeafPath] = (*ckpt.plain, *ckpt.other)
    for path in paths:
        found.setdefault(str(path[0]), [str(path[0])]).append(join(path))
    return found
