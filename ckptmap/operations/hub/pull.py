"""pull(): fetch a checkpoint from the Hub as it is; every file is verified, all or none appear."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.framework_members import unread_note
from ckptmap.checkpoint.open import open, open_in
from ckptmap.core import argument_checks
from ckptmap.core.formatting import counted, human
from ckptmap.core.log import log
from ckptmap.core.printable import as_lines, one_line
from ckptmap.core.short_repr import ShortRepr
from ckptmap.core.signatures import nearest_keyword
from ckptmap.errors import CkptmapError, RunError, SourceError
from ckptmap.execution.phases import Phases
from ckptmap.operations.overwrite import refuse_stranger
from ckptmap.protocols.progress import DOWNLOADING, PROVING, READING, SYNCING, Progress
from ckptmap.storage.destination import named_place
from ckptmap.storage.files import Files
from ckptmap.storage.hub.entry import Entry
from ckptmap.storage.hub.mirror import Mirror, mirrored
from ckptmap.storage.hub.resolve import origins_in_errors, refuse_elsewhere
from ckptmap.storage.hub.uri import is_hub, parse
from ckptmap.storage.publish import WorkDirectory
from ckptmap.storage.publish_by_marker import is_pending
from ckptmap.storage.recover import clear_published
from ckptmap.storage.sync import sync_tree

OTHER_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot",
    ".npz", ".distcp", ".index.json", ".tflite", ".mlmodel",
)  # fmt: skip
"""Suffixes of weights. Of a model directory, weights in other forms stay on the Hub."""

GIT = (".gitattributes", ".gitignore")
"""Settings of Git for the repository, which are no part of the checkpoint."""


@dataclass(frozen=True, repr=False)
class PullReport(ShortRepr):
    """What a pull did."""

    src: str
    dst: str
    files: int
    nbytes: int
    seconds: float
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "schema": 1, "src": self.src, "dst": self.dst, "files": self.files,
            "nbytes": self.nbytes, "seconds": round(self.seconds, 3), "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        line = (
            f"fetched {self.src} to {self.dst}: {counted(self.files, 'file')}, {human(self.nbytes)} in"
            f" {self.seconds:.1f} s; sizes and hashes checked"
        )
        return as_lines([line, *(f"note: {note}" for note in self.notes)])


@nearest_keyword
def pull(
    src: str,
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    sync: bool = True,
    progress: bool | Progress = False,
) -> PullReport:
    """Fetch the files of the checkpoint at `hf://org/name[@revision][/folder]` as they are.

    These are the files that its index names and those beside it (config, tokenizer, card), without
    weights in other forms. The destination is complete or untouched. The same call continues one
    that was interrupted and keeps whole files. `sync` and `progress` are those of `RunOptions`. Raises SourceError
    where there is no checkpoint, DestinationError where the destination must not be written,
    RunError CKM709 where a file is not the one that the Hub lists.
    """
    argument_checks.path("src", src)
    named_place(dst)  # before the first request
    if not is_hub(src):
        refuse_elsewhere(str(src))
        meant = f"hf://{src}" if str(src).count("/") == 1 else "hf://org/name"
        raise SourceError(
            "CKM701",
            f"{src}: is not a place on the Hub",
            f"write {meant}, or use ckptmap convert",
        )
    phases = Phases.of(progress)
    log.info("pull %s to %s", one_line(src), one_line(str(dst)))
    phases.begin(READING)
    files = Files()
    with closing(files), origins_in_errors(files.mounts):
        return _pull(files, src, dst, overwrite, sync, phases)


def _pull(
    files: Files,
    src: str,
    dst: str | os.PathLike[str],
    overwrite: bool,
    sync: bool,
    phases: Phases,
) -> PullReport:
    """Fetch what `files` open at `src`."""
    started = time.monotonic()
    mirror, place = mirrored(parse(src), files.mounts)
    ckpt = open_in(files, src)
    entries, skipped = _choose_files(ckpt, mirror, place)
    unread = unread_note(
        ckpt.index.unread_files
    )  # what is fetched is no longer left, the rest is told below
    notes = [
        *(note for note in ckpt.notes if note not in unread),
        *([f"left on the Hub: {', '.join(skipped[:6])}"] if skipped else []),
    ]
    one_file, target = place.is_file(), named_place(dst)
    nbytes = sum(entry.nbytes for entry in entries.values())
    if _is_complete(target, entries, one_file):
        notes.append("was complete already")
        if sync:
            sync_tree(target)
        notes += clear_published(target, _digest(ckpt.origin, entries), sync)
    else:
        if overwrite and not is_pending(target):
            refuse_stranger(target, entries)
        with WorkDirectory.open(
            target, _digest(ckpt.origin, entries), one_file=one_file, overwrite=overwrite,
            nbytes=nbytes,
        ) as work:  # fmt: skip
            phases.begin(DOWNLOADING, nbytes)
            _fetch(mirror, entries, work, phases)
            phases.begin(PROVING)
            _prove(work.out_dir / target.name if one_file else work.out_dir, ckpt)
            phases.begin(SYNCING)
            work.publish([target.name] if one_file else entries, sync)
            notes += work.notes
    seconds = time.monotonic() - started
    return PullReport(ckpt.origin, str(target), len(entries), nbytes, seconds, notes)


def _choose_files(
    ckpt: Checkpoint, mirror: Mirror, place: Path
) -> tuple[dict[str, Entry], list[str]]:
    """Return the files by their names in the destination, and the names left on the Hub."""
    index_files = {*ckpt.index.files, *(str(place / name) for name in ckpt.index.missing_weights)}
    if place.is_file():
        return {place.name: mirror.entry(str(place))}, []
    of_transformers = ckpt.index.container in ("hf", "hf-bin")
    entries, skipped = {}, []
    for file, entry in mirror.entries():
        name = Path(file).relative_to(place).as_posix()
        if file not in index_files and name.startswith(GIT):
            continue
        if file in index_files or not name.endswith(OTHER_WEIGHTS) or not of_transformers:
            entries[name] = entry
        else:
            skipped.append(name)
    return entries, skipped


def _digest(origin: str, entries: Mapping[str, Entry]) -> str:
    lines = [origin, *(f"{name} {entry.digest}" for name, entry in sorted(entries.items()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_complete(target: Path, entries: Mapping[str, Entry], one_file: bool) -> bool:
    """Return whether the destination is complete: a run may have been killed after it published."""
    files = {target if one_file else target / name: entry for name, entry in entries.items()}
    return all(file.is_file() and entry.is_in(file) for file, entry in files.items())


def _fetch(
    mirror: Mirror, entries: Mapping[str, Entry], work: WorkDirectory, phases: Phases
) -> None:
    """Download each file to where it is published from; keep those of an earlier run."""
    downloads = work.path / "coming"
    for name, entry in entries.items():
        file = work.out_dir / (work.dst.name if work.one_file else name)
        phases.advance(0, name)
        if file.is_file() and entry.is_in(file):
            phases.advance(entry.nbytes, name)
            continue
        download = mirror.repo.download(entry, downloads)
        file.parent.mkdir(parents=True, exist_ok=True)
        os.replace(download, file)
        phases.advance(entry.nbytes, name)
    shutil.rmtree(downloads, ignore_errors=True)


def _prove(path: Path, ckpt: Checkpoint) -> None:
    """Check that the download opens, and holds the tensors that the headers on the Hub listed."""
    try:
        with open(path) as pulled:
            is_equal = {fqn: pulled.group(fqn).info for fqn in pulled} == {
                fqn: ckpt.group(fqn).info for fqn in ckpt
            }
    except CkptmapError as error:
        raise RunError(
            "CKM709",
            f"{ckpt.origin}: what was fetched does not open: {error}",
            "run the same command again",
        ) from error
    if not is_equal:
        raise RunError(
            "CKM709",
            f"{ckpt.origin}: what was fetched holds other tensors",
            "run the same command again",
        )
