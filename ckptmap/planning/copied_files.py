"""Files of a framework's directory that are copied whole: schedulers, random states, custom objects.

The output has such a file of its own for each value, so the source's file is copied byte for byte.

    accelerate's custom_checkpoint_0.pkl, random_states_1.pkl    -> accelerate's, the same bytes
    Trainer's scheduler.pt                                       -> accelerate's scheduler.bin
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.framework_members import unread_note
from ckptmap.core.state_paths import join
from ckptmap.protocols import CarriedFile, Setup
from ckptmap.protocols.file_systems import through
from ckptmap.storage.safe_names import blobs_of, inside
from ckptmap.storage.sidecar import Sidecar
from ckptmap.tensors import Path as LeafPath

FIRST = 0
"""The rank whose file a new rank's file is made of."""


@dataclass(frozen=True)
class CopiedFiles:
    """The files that are copied.

    files    name in the output -> the file
    sources  key of a plain value -> path of the source's file that holds it
    notes    what the user is told of values that go from one number of ranks to another
    """

    files: Mapping[str, CarriedFile] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def holds(self, path: LeafPath) -> bool:
        """Return whether the value at this path of the source is in one of the files."""
        return str(path[0]) in self.sources

    def source_notes(self, ckpt: Checkpoint, carried: Collection[str]) -> list[str]:
        """Return the notes of the source; a file that is copied is not told of as left behind.

        `carried` are the names of files beside the weights that the output has, too.
        """
        names = {*(Path(file).name for file in self.sources.values()), *carried}
        left = [name for name in ckpt.index.unread_files if name.rpartition(" of ")[2] not in names]
        old = unread_note(ckpt.index.unread_files)
        notes = [note for note in ckpt.notes if note not in old]
        return [*notes, *unread_note(left), *self.notes]


def copied_files(
    ckpt: Checkpoint, setup: Setup, world_size: int, dropped: Callable[[str], str | None]
) -> CopiedFiles:
    """Return the files of the source that the setup has a place for.

    A file is not copied if it holds a key for which `dropped` gives a reason, or belongs to a rank
    that the output does not have. Raises SourceError CKM116 for a link that leads out of the
    directory.
    """
    filing = setup.filing
    if filing is None:
        return CopiedFiles()
    mounts = ckpt.files.mounts
    filing, keys_of = through(filing, mounts), _keys_by_entry(ckpt)
    files: dict[str, CarriedFile] = {}
    sources: dict[str, str] = {}
    of_rank: dict[int, str] = {}
    for key, file in ckpt.index.file_of.items():
        name, rank = filing.file_of(key), filing.rank_of(key)
        if name is None or any(dropped(inner) for inner in keys_of.get(key, (key,))):
            continue
        if rank is not None:
            if setup.sharded and rank >= world_size:
                continue
            of_rank[rank] = file
        directory = str(Path(file).parent)
        inside(directory, Path(file).name, directory, blobs_of(directory))
        files[name], sources[key] = Sidecar.at(file, mounts), file
    if not setup.sharded or ckpt.world_size == world_size:
        return CopiedFiles(files, sources)
    for rank in range(world_size) if FIRST in of_rank else ():
        new_file = None if rank in of_rank else filing.new_rank(rank, of_rank[FIRST])
        if new_file is not None:
            files[new_file[0]] = new_file[1]
    return CopiedFiles(files, sources, filing.notes(sources, ckpt.world_size, world_size))


def _keys_by_entry(ckpt: Checkpoint) -> Mapping[str, Sequence[str]]:
    """Return, by key of an entry of the source, the entry's key and all dotted keys below it."""
    keys: dict[str, list[str]] = {}
    paths: Iterable[LeafPath] = (*ckpt.plain, *ckpt.other)
    for path in paths:
        keys.setdefault(str(path[0]), [str(path[0])]).append(join(path))
    return keys
