"""Power loss: a run is recorded, and replayed up to a call, of which only what was synced is sure.

What was written and not synced may be there, or not, or in part; a new name may be there before
what it names. Then, as after a fault: the destination is old or absent, or complete and verified;
the same command succeeds and leaves nothing behind. With --no-sync a destination may be incomplete
instead, if verify says so.

    recovered  as promised
    told       --no-sync: the destination is incomplete, and verify finds that
    mixed, lost, stuck, left, internal   what else there was
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ckptmap.storage.locks import read_owner
from tests.torture.faults import attempt, judged
from tests.torture.operations import NEW, Operation
from tests.torture.runner import Outcome, forked
from tests.torture.system_calls import Calls, Event

MODES = (
    "nothing unsynced",
    "names without bytes",
    "bytes without names",
    "some of it",
    "all but the last",
)


class Power:
    name = "power"
    good = frozenset({"recovered", "told"})

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations

    def case(self, draw: random.Random, folder: Path) -> Iterator[Outcome]:
        op = draw.choice(self.operations)
        place = folder / "place"
        op.prepare(place)
        cut = forked(lambda: run_and_cut(op, place, draw))  # after a power cut no process lives
        yield cut
        if cut.result != "begun":
            return
        state = op.state(place)
        if not op.sync and state.startswith("verify: "):
            yield replace(cut, result="told", text=state)
            return
        lock = place / f".{op.dst}.ckptmap-lock"
        if lock.exists() and read_owner(lock) is None:
            told = forked(lambda: attempt(op, place, None))
            if state != NEW and not (told.text.startswith("CKM305") and str(lock) in told.text):
                yield replace(
                    cut, result="stuck", text=f"{told.result} by a damaged lock: {told.text}"
                )
                return
            lock.unlink(missing_ok=True)  # as the error says
        result, text = judged(op, place, Outcome("killed", "", ""))
        yield replace(cut, result=result, text=text)


def run_and_cut(op: Operation, place: Path, draw: random.Random) -> Iterator[Outcome]:
    """Run an operation, and leave in `place` what is on the disk after a power cut."""
    disk = Disk.of(place)
    calls = Calls(place)
    with pytest.MonkeyPatch.context() as patch:
        calls.install(patch)
        op.run(place)
    at = draw.choice((len(calls.events), draw.randint(1, len(calls.events)), draw.randint(1, len(calls.events))))  # fmt: skip
    mode, last = draw.choice(MODES), calls.events[at - 1]
    label = (
        f"{mode}, after call {at} of {len(calls.events)}: {last.call} {Path(last.paths[-1]).name}"
    )
    disk.replay(calls.events[:at], mode, draw)
    shutil.rmtree(place)
    disk.write(place)
    yield Outcome("begun", op.name, label)


@dataclass
class Disk:
    """Directories as names -> inodes, and files as bytes; `root` is the inode of the folder."""

    root: int
    top: str
    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    files: dict[int, bytearray] = field(default_factory=dict)
    directories: set[int] = field(default_factory=set)
    """Inodes that are folders, though no name in them may be there."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Inode -> the number of the last file or folder that was made with it."""

    @classmethod
    def of(cls, place: Path) -> Disk:
        disk = cls(place.stat().st_ino, os.path.realpath(place))
        for folder, folders, files in os.walk(place):
            here = os.stat(folder).st_ino
            names = {
                name: os.lstat(os.path.join(folder, name)).st_ino for name in (*folders, *files)
            }
            disk.folders[here] = names
            disk.directories.add(here)
            for name in files:
                disk.files[names[name]] = bytearray(Path(folder, name).read_bytes())
        return disk

    def replay(self, events: Sequence[Event], mode: str, draw: random.Random) -> None:
        """Apply what the mode leaves of the events; the folders of paths are those of the whole run."""
        events = list(self._told_apart(events))
        running = Disk(
            self.root, self.top, {k: dict(v) for k, v in self.folders.items()}, {}, self.directories
        )
        changes = [change for event in events for change in running._changes(event)]
        synced: dict[int, int] = {}
        for number, change in enumerate(changes):
            if change.syncs:
                synced[change.syncs] = number
        for number, change in enumerate(changes):
            sure = number < synced.get(change.inode, -1)
            if change.syncs or not (sure or _kept(mode, change, number, len(changes), draw)):
                continue
            self._apply(change, sure or mode != "some of it", draw)

    def _told_apart(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yield the events with a number of its own for every file that was made: ext4 gives the
        inode of a file that is gone to the next one."""
        for count, event in enumerate(events, start=1):
            if event.call in ("create", "mkdir"):
                self.numbers[event.inode] = count << 64 | event.inode
            yield replace(event, inode=self.numbers.get(event.inode, event.inode))

    def _apply(self, change: Change, whole: bool, draw: random.Random) -> None:
        if change.names:
            for folder, name, inode in change.names:
                names = self.folders.setdefault(folder, {})
                if inode:
                    names[name] = inode
                else:
                    names.pop(name, None)
            return
        data = self.files.setdefault(change.inode, bytearray())
        if change.length is not None:
            data[:] = data[: change.length].ljust(change.length, b"\0")
            return
        part = change.data if whole else change.data[: draw.randint(0, len(change.data))]
        data[:] = data.ljust(change.offset + len(part), b"\0")
        data[change.offset : change.offset + len(part)] = part

    def _changes(self, event: Event) -> Iterator[Change]:
        """Yield what an event changes, and make the change of names here."""
        match event.call:
            case "write":
                yield Change(event.inode, data=event.data, offset=event.offset)
            case "truncate":
                yield Change(event.inode, length=event.offset)
            case "sync":
                yield Change(event.inode, syncs=event.inode)
            case _:
                names = self._names(event)
                for folder, name, inode in names:
                    if inode:
                        self.folders.setdefault(folder, {})[name] = inode
                    else:
                        self.folders[folder].pop(name, None)
                yield Change(names[-1][0], names=tuple(names))

    def _names(self, event: Event) -> list[tuple[int, str, int]]:
        """Return (folder, name, inode) for each name that an event gives, inode 0 for what it removes."""
        places = [
            (self._inode(os.path.dirname(path)), os.path.basename(path)) for path in event.paths
        ]
        if event.call == "exchange":
            (one, a), (two, b) = places
            return [(one, a, self.folders[two][b]), (two, b, self.folders[one][a])]
        if event.call == "unlink":
            return [(*places[0], 0)]
        gone = [(*places[0], 0)] if event.call == "rename" else []
        if event.call == "mkdir":
            self.folders[event.inode] = {}
            self.directories.add(event.inode)
        return [*gone, (*places[-1], event.inode)]

    def _inode(self, path: str) -> int:
        inode = self.root
        for name in Path(path).relative_to(self.top).parts:
            inode = self.folders[inode][name]
        return inode

    def write(self, place: Path) -> None:
        """Make what is on this disk: a name whose file has no bytes yet is an empty file."""
        inodes = dict(self._write(place, self.root))
        for marker in place.rglob("publishing"):  # which holds an inode's number
            text = marker.read_text()
            if text.isdigit():
                marker.write_text(str(inodes.get(self.numbers.get(int(text), int(text)), 0)))

    def _write(self, at: Path, inode: int) -> Iterator[tuple[int, int]]:
        """Write a file or folder, and yield (inode here, inode of what was written) of all of it."""
        if inode in self.directories:
            at.mkdir()
            for name, inner in self.folders.get(inode, {}).items():
                yield from self._write(at / name, inner)
        else:
            at.write_bytes(self.files.get(inode, b""))
        yield inode, at.stat().st_ino


@dataclass(frozen=True)
class Change:
    """One change of a disk: bytes or the length of a file, names in folders, or a sync of an inode.

    `inode` is what must be synced for the change to be sure: the file, or the folder of the new name.
    """

    inode: int
    data: bytes = b""
    offset: int = 0
    length: int | None = None
    names: tuple[tuple[int, str, int], ...] = ()
    syncs: int = 0


def _kept(mode: str, change: Change, number: int, count: int, draw: random.Random) -> bool:
    """Return whether a change that no sync made sure is on the disk."""
    kept: Mapping[str, bool] = {
        "nothing unsynced": False,
        "names without bytes": bool(change.names),
        "bytes without names": not change.names,
        "some of it": draw.random() < 0.5,
        "all but the last": number < count - 3,
    }
    return kept[mode]
