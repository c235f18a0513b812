"""Mirror a Hugging Face repository as a local directory of placeholders: names and sizes, no
content.

The directory looks like a download. Bytes are fetched only when `ckptmap.storage.files` reads them:
a header by a range request, a whole file when it is converted. Ranges are kept in the placeholder,
which is a sparse file in the temporary directory. Whole files are kept in huggingface_hub's cache,
or, with --low-disk, in a directory of the run. The holes of a placeholder are never read: missing
bytes are fetched first.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ckptmap.core.formatting import human
from ckptmap.errors import CkptmapError, RunError, SourceError
from ckptmap.protocols.file_systems import Fingerprint, Mounts
from ckptmap.storage.hub.entry import Entry
from ckptmap.storage.hub.repo import READ_NBYTES, Repo
from ckptmap.storage.hub.uri import MIRROR_PREFIX, HubName

BLOCK = 64 << 10
"""The least bytes of a range request: one request returns most safetensors headers whole."""
SMALL_BLOCK = 4 << 10
"""The least bytes in the middle of a file, where a small header stands before each tensor."""
KEPT_NBYTES = 4 << 20
"""Larger reads are tensor values: they go to the reader's buffers and are not kept."""
AT_ONCE = 8
"""Shards whose headers are requested at the same time."""
SHARD = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)(?P<suffix>\.\w+)")


class _Ranges:
    """The byte ranges of a file that were fetched: disjoint, sorted (start, stop)."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of start..stop that were not fetched yet."""
        for low, high in self.spans:
            if high <= start or low >= stop:
                continue
            if low > start:
                yield start, low
            start = max(start, high)
        if start < stop:
            yield start, stop

    def add(self, start: int, stop: int) -> None:
        at = bisect_right(self.spans, (start, stop))
        self.spans.insert(at, (start, stop))
        merged: list[tuple[int, int]] = []
        for low, high in self.spans:
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.spans = merged


class _File:
    """One placeholder: its fetched ranges, and the path of a whole copy."""

    def __init__(self, path: str, entry: Entry) -> None:
        self.path, self.entry = path, entry
        self.ranges = _Ranges()
        self.held: str | None = None
        self.staged = False
        """True if the whole copy is in a directory of the run, not in huggingface_hub's cache."""
        self.lock = threading.Lock()


class Mirror:
    """The placeholders of one repository, or of a folder in it, at `root`."""

    def __init__(self, repo: Repo, name: HubName, root: Path, entries: dict[str, Entry]) -> None:
        self.repo, self.name, self.root = repo, name, root
        self.origin = str(HubName(repo.id, repo.commit))
        self._remove = weakref.finalize(self, _remove, root.parent, os.getpid())
        """Removes the placeholders: when the mirror is closed or freed, at the latest at exit."""
        self._files: dict[str, _File] = {}
        for path, entry in entries.items():
            file = root / path
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as stream:
                    stream.truncate(entry.nbytes)
            except OSError as error:
                raise SourceError(
                    "CKM716",
                    f"{self.origin}/{path}: cannot be given a file on this machine: {error.strerror}",
                    "set TMPDIR to another file system, or fetch it with huggingface_hub",
                ) from error
            self._files[str(file)] = _File(str(file), entry)

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield (placeholder, repository entry) of every file."""
        return ((file, held.entry) for file, held in self._files.items())

    def entry(self, file: str) -> Entry:
        return self._files[file].entry

    # ------------------------------------------- the FileSystem protocol of protocols.file_systems

    def fingerprint(self, file: str) -> Fingerprint | None:
        """Return a fingerprint by content, the same on every machine; None: `file` is a folder."""
        remote = self._files.get(file)
        if remote is None:
            return None
        return Fingerprint(remote.entry.nbytes, int(remote.entry.digest[:15], 16), 0)

    def held(self, file: str) -> str | None:
        remote = self._files.get(file)
        return None if remote is None else remote.held

    def fetch(self, file: str, into: Path | None = None) -> str:
        """Fetch the whole file and verify it; return its path in huggingface_hub's cache, or
        `into`.

        Raises RunError CKM709 if bytes that were read by range before differ from those of the
        file.
        """
        remote = self._files[file]
        with remote.lock:
            if remote.held is None:
                cached = self.repo.cached(remote.entry)
                sound = cached is not None and remote.entry.is_in(cached)
                remote.staged = into is not None and not sound
                held = cached if cached and sound else self.repo.download(remote.entry, into)
                _check_ranges(remote, held, self.origin)
                remote.held = held
            return remote.held

    def fetch_all(self, files: Sequence[str], into: Path | None) -> None:
        """Fetch these files whole. Raises RunError CKM710 if they do not fit on the disk."""
        from huggingface_hub.constants import HF_HUB_CACHE

        remotes = [self._files[file] for file in files]
        missing = [f for f in remotes if f.held is None and self.repo.cached(f.entry) is None]
        place = into or Path(HF_HUB_CACHE)
        place.mkdir(parents=True, exist_ok=True)
        needed, free = sum(f.entry.nbytes for f in missing), shutil.disk_usage(place).free
        if needed > free:
            raise RunError(
                "CKM710",
                f"{place}: needs {human(needed)} for {self.origin}, {human(free)} free",
                "free some, or set HF_HOME to a larger disk"
                + ("" if into else ", or keep one shard at a time with --low-disk"),
            )
        for file in files:
            self.fetch(file, into)

    def close(self) -> None:
        self._remove()

    def discard(self, file: str) -> None:
        remote = self._files[file]
        with remote.lock:
            if remote.held is not None and remote.staged:
                with suppress(FileNotFoundError):
                    Path(remote.held).unlink()
                remote.held, remote.staged = None, False

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, by range requests for bytes that are not kept.

        Raises RunError CKM308 for bytes past the end of the file.
        """
        remote = self._files[file]
        wanted = sum(buffer.nbytes for buffer in buffers)
        if offset < 0 or offset + wanted > remote.entry.nbytes:
            raise RunError(
                "CKM308",
                f"{file}: ended at byte {remote.entry.nbytes}, expected {offset + wanted}",
                "it is truncated where it was made; use another revision",
            )
        if wanted > KEPT_NBYTES:
            self._stream(remote.entry, offset, buffers)
            return
        if offset == 0:
            self._ahead(remote)
        with remote.lock:
            self._bring(remote, offset, offset + wanted)
        with Path(file).open("rb") as placeholder:
            os.preadv(placeholder.fileno(), buffers, offset)

    def _stream(self, entry: Entry, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            flat = buffer.cast("B")
            for at in range(0, flat.nbytes, READ_NBYTES):
                nbytes = min(READ_NBYTES, flat.nbytes - at)
                flat[at : at + nbytes] = self.repo.read(entry, offset + at, nbytes)
            offset += flat.nbytes

    def _bring(self, remote: _File, start: int, stop: int) -> None:
        """Fetch the missing parts of start..stop, in whole blocks, into the placeholder."""
        if not any(remote.ranges.missing(start, stop)):
            return
        end = remote.entry.nbytes
        midst = start >= BLOCK and stop <= end - BLOCK and stop - start <= SMALL_BLOCK
        block = SMALL_BLOCK if midst else BLOCK
        start, stop = start // block * block, min(-(-stop // block) * block, end)
        for low, high in list(remote.ranges.missing(start, stop)):
            with Path(remote.path).open("r+b") as placeholder:
                for at in range(low, high, READ_NBYTES):
                    data = self.repo.read(remote.entry, at, min(READ_NBYTES, high - at))
                    os.pwrite(placeholder.fileno(), data, at)
            remote.ranges.add(low, high)

    def _ahead(self, remote: _File) -> None:
        """Fetch the first block of every shard of a set at once, when one of them is read first."""
        match = SHARD.fullmatch(remote.entry.path)
        if match is None or remote.ranges.spans:
            return
        family = re.compile(
            rf"{re.escape(match['stem'])}-\d+-of-{match['count']}{re.escape(match['suffix'])}"
        )
        kin = [
            file for file in self._files.values()
            if family.fullmatch(file.entry.path) and not file.ranges.spans and file.entry.nbytes
        ]  # fmt: skip
        if len(kin) > 1:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(self._first_block, kin))

    def _first_block(self, remote: _File) -> None:
        with remote.lock, suppress(CkptmapError):  # a later read of the shard raises it again
            self._bring(remote, 0, min(BLOCK, remote.entry.nbytes))


def _check_ranges(remote: _File, held: str, origin: str) -> None:
    with Path(remote.path).open("rb") as placeholder, Path(held).open("rb") as whole:
        for low, high in remote.ranges.spans:
            read = os.pread(placeholder.fileno(), high - low, low)
            if read != os.pread(whole.fileno(), high - low, low):
                raise RunError(
                    "CKM709",
                    f"{origin}/{remote.entry.path}: bytes {low}..{high} read by range differ from"
                    " the file that was downloaded",
                    "run the same command again",
                )


# ----------------------------------------------------------------- where mirrors are mounted


def mirrored(name: HubName, mounts: Mounts) -> tuple[Mirror, Path]:
    """Return the mirror of a place on the Hub, and the local path of the place in it.

    The mirror is mounted in `mounts`. One that is there already is returned again.
    """
    for mirror in mounts:
        if isinstance(mirror, Mirror) and mirror.name == name:
            return mirror, mirror.root / name.path
    mirror = _made(name)
    mounts.mount(str(mirror.root), mirror)
    return mirror, mirror.root / name.path


def _made(name: HubName) -> Mirror:
    repo = Repo.find(name)
    folder = name.path
    if name.path and repo.at(name.path) is not None:
        folder = str(Path(name.path).parent) if "/" in name.path else ""
    entries = repo.tree(folder)
    _sweep()
    root = (
        Path(tempfile.mkdtemp(prefix=f"{MIRROR_PREFIX}{os.getpid()}-")).resolve()
        / repo.id.split("/")[1]
    )
    root.mkdir()
    try:
        return Mirror(repo, name, root, entries)
    except BaseException:
        shutil.rmtree(root.parent, ignore_errors=True)
        raise


def _remove(directory: Path, maker: int) -> None:
    if os.getpid() == maker:  # a forked process must not remove the files of its parent
        shutil.rmtree(directory, ignore_errors=True)


def _sweep() -> None:
    """Remove the mirrors that killed processes of this user left behind."""
    for left in Path(tempfile.gettempdir()).glob(f"{MIRROR_PREFIX}*"):
        match = re.match(rf"{MIRROR_PREFIX}(\d+)-", left.name)
        with suppress(OSError):
            if match and left.stat().st_uid == os.getuid() and not _lives(int(match[1])):
                shutil.rmtree(left, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
