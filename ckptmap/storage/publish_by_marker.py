"""Publish a directory where the file system cannot rename one: file by file, the manifest last.

On overlayfs a directory of a lower layer cannot be renamed (EXDEV), on many mounts of object stores
none can (EPERM, ENOSYS), and nowhere one that something is mounted on (EBUSY). There the files are
moved one by one:

    1. `.ckptmap-publishing` is written into the destination, with the names of all files
    2. the files that are replaced are moved into the work directory, their manifest first
    3. the new files are moved, `ckptmap.manifest.json` last
    4. `.ckptmap-publishing` is removed

While `.ckptmap-publishing` is there, ckptmap does not open the directory (CKM111). A run that is
killed meanwhile leaves it; the next run moves all files back, the old ones, too, and goes on. Only
where no file can be moved into the work directory, old files are removed in step 2.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ckptmap.core.json_text import parse_object
from ckptmap.errors import DestinationError
from ckptmap.storage.own_files import MANIFEST, PENDING, create, read_plain, write_new
from ckptmap.storage.sync import files_below, raised, sync, sync_directories

PUBLISHING = "publishing"
"""The file in a work directory that holds the inode of the output."""
OLD = "old"
"""The name in a work directory that a replaced output has for a moment."""
REPLACED = "replaced"
"""The directory in a work directory that holds the replaced files of an output."""
PROBE = ".ckptmap-probe"
"""The file in a directory `OLD` that holds no output, but was made to try a rename."""
REFUSED = (
    errno.EXDEV, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBUSY,
)  # fmt: skip
"""What a file system answers that cannot rename."""
COPIED_NBYTES = 8 << 20
_LATE = (".json", ".metadata", "latest")
"""Ends of names of files without which readers do not take a directory for a whole checkpoint."""


def rename_problem(work: Path, out_dir: Path, dst: Path) -> str:
    """Return what the system says when a directory is to be renamed here; "" where it can be.

    A new directory is renamed inside `work`. Then `out_dir`, and `dst` where it is a directory, are
    renamed over a directory that is not empty. That must fail and changes nothing; but where they
    cannot be renamed at all, it fails for that reason. Where `dst` is renamed all the same, it lies
    at `OLD` until it is renamed back: a run that is killed then restores it (`recover`).
    """
    probe = work / "probe"
    shutil.rmtree(probe, ignore_errors=True)
    full = probe / "full"
    try:
        (probe / "new").mkdir(parents=True)
        (probe / "new" / PROBE).touch()
        os.rename(probe / "new", full)
        # What was made just now is like `new`; only what is older can lie in a layer below.
        if any(out_dir.iterdir()):
            _rename_over(out_dir, full)
        if dst.is_dir():
            (probe / "old").mkdir()
            (probe / "old" / PROBE).touch()
            os.rename(probe / "old", work / OLD)
            _rename_over(dst, work / OLD)
    except OSError as error:
        if error.errno in REFUSED:
            return os.strerror(error.errno or 0)
        raise
    finally:
        remove_probe(work)
    return ""


def remove_probe(work: Path) -> None:
    """Remove the directories in a work directory by which renames were tried. Raises OSError."""
    probe, old = work / "probe", work / OLD
    shutil.rmtree(probe, ignore_errors=True)
    if not old.is_symlink() and old.is_dir() and os.listdir(old) == [PROBE]:
        os.rename(old, probe)  # at once: an empty `old` could be an output
        shutil.rmtree(probe)


def _rename_over(directory: Path, full: Path) -> None:
    try:
        os.rename(directory, full)
    except OSError as error:
        if error.errno in REFUSED:
            raise
        return
    os.rename(full, directory)  # a file system that replaces what is not empty


def file_rename_problem(work: Path) -> str:
    """Return what the system says when a file is to be renamed here; "" where it can be."""
    probe = work / "probe"
    moved = work / "probe-moved"
    try:
        write_new(probe, [])
        os.rename(probe, moved)
    except OSError as error:
        if error.errno in REFUSED:
            return os.strerror(error.errno or 0)
        raise
    finally:
        for file in (probe, moved):
            with contextlib.suppress(OSError):
                file.unlink()
    return ""


def note(dst: Path, problem: str) -> str:
    return (
        f"{dst}: directories cannot be renamed there ({problem}), so its files were moved one by"
        f" one, {MANIFEST} last; before that was there it was not complete"
    )


# ------------------------------------------------------------------------------ publishing


def publish_by_marker(out_dir: Path, dst: Path, files: Collection[str], synced: bool) -> None:
    """Move the files of `out_dir` into `dst`; replace what is there. Raises OSError.

    The files are synced already. With `synced` every step is on the disk before the next one.
    """
    work = out_dir.parent
    dst.mkdir(exist_ok=True)
    replaced = sorted(os.path.relpath(file, dst) for file in files_below(dst))
    aside = _place_for_replaced(work, dst) if replaced else None
    record = {"work": work.name, "files": sorted(files), "replaced": replaced}
    pending = work / "pending"
    write_new(pending, [json.dumps(record).encode()])
    if synced:
        for path in (pending, work, dst.parent):
            sync(path)
    _rename_or_copy(pending, dst / PENDING, synced)  # at once: half of a record would be in the way
    if synced:
        sync_directories(dst)
    note_inode(work, dst, synced)
    for name in sorted(replaced, key=lambda name: name != MANIFEST):
        if aside is None:
            (dst / name).unlink()
        else:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(dst / name, aside / name)
    _remove_empty_folders(dst)
    if synced and aside is not None:
        sync_directories(aside)
        sync_directories(dst)
    *early, last = sorted(files, key=_order)
    for name in early:
        _move(out_dir / name, dst / name, synced)
    if synced:
        sync_directories(dst)
    _move(out_dir / last, dst / last, synced)
    if synced:
        sync(dst)
    (dst / PENDING).unlink()
    if synced:
        sync(dst)


def _place_for_replaced(work: Path, dst: Path) -> Path | None:
    """Make the directory for replaced files; None where files of `dst` cannot be moved into it."""
    if dst.lstat().st_dev != work.lstat().st_dev or file_rename_problem(work):
        return None
    aside = work / REPLACED
    aside.mkdir(exist_ok=True)
    return aside


def note_inode(work: Path, content: Path, synced: bool) -> None:
    """Write the inode of the output into its work directory: the next run can tell by it whether the
    output is at the destination."""
    marker = work / PUBLISHING
    write_new(marker, [str(content.lstat().st_ino).encode()])
    if synced:
        sync(marker)
        sync(work)


def _order(name: str) -> tuple[bool, bool, str]:
    return name == MANIFEST, name.endswith(_LATE), name


def _move(old: Path, new: Path, synced: bool) -> None:
    """Move a file to a name that is free; see `_rename_or_copy`."""
    new.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(new):
        raise DestinationError(
            "CKM301",
            f"{new}: appeared while it was published",
            "move it away, then run the same command again",
        )
    _rename_or_copy(old, new, synced)


def _rename_or_copy(old: Path, new: Path, synced: bool) -> None:
    """Rename a file; where files cannot be renamed either, copy it and leave the old one."""
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        create(new, _content(old))
        if synced:
            sync(new)


def _content(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(COPIED_NBYTES):
            yield piece


# -------------------------------------------------------------------------------- recovery


def is_pending(dst: Path) -> bool:
    """Return whether a run began to publish `dst` file by file, and has not finished."""
    return os.path.lexists(dst / PENDING)


def withdraw(dst: Path, uid: int) -> str:
    """Move what a killed run has published back into its work directory; return a note.

    Raises OSError; DestinationError CKM304 where that cannot be, CKM301 where other files are in the
    way.
    """
    try:
        work, files, replaced = _record(dst, uid)
    except DestinationError:
        if os.listdir(dst) != [PENDING]:
            raise
        # A run was killed while it wrote the record, where that is not done at once.
        (dst / PENDING).unlink()
        return f"{dst}: a run was killed before it published a file; the directory is empty again"
    out_dir = dst.parent / work / "out"
    if not out_dir.is_dir() or out_dir.is_symlink():
        raise _cannot(dst, f"is half published, and {out_dir} with the rest is gone")
    (out_dir.parent / PUBLISHING).unlink(missing_ok=True)
    aside = out_dir.parent / REPLACED
    kept = {os.path.relpath(file, aside) for file in files_below(aside)} if aside.is_dir() else None
    if kept is None or kept.issuperset(replaced):  # else no new file was moved yet
        _take_back(dst, out_dir, files)
    _restore(dst, aside, kept, replaced)
    restored = set() if kept is None else {str(dst / name) for name in replaced}
    others = [f for f in files_below(dst) if f not in restored and f != str(dst / PENDING)]
    if others:
        raise DestinationError(
            "CKM301",
            f"{others[0]}: appeared after a run was killed while it published {dst}",
            "move it away, then run again",
        )
    sync_directories(out_dir.parent)
    (dst / PENDING).unlink()
    shutil.rmtree(aside, ignore_errors=True)
    _remove_empty_folders(dst)
    with contextlib.suppress(OSError):
        dst.rmdir()  # an empty directory may stay
    return f"{dst}: a run was killed while it published file by file; it was taken back first"


def _take_back(dst: Path, out_dir: Path, files: Sequence[str]) -> None:
    """Move the new files that are published back into the work directory."""
    for name in files:
        if not os.path.lexists(dst / name):
            continue
        if os.path.lexists(out_dir / name):
            (dst / name).unlink()
            continue
        (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
        _move(dst / name, out_dir / name, synced=True)
        with contextlib.suppress(FileNotFoundError):  # it is still there where it was copied
            (dst / name).unlink()


def _restore(dst: Path, aside: Path, kept: Collection[str] | None, replaced: Sequence[str]) -> None:
    """Move the replaced files back; remove those that are left where others of them were removed."""
    for name in replaced:
        if kept is None:
            with contextlib.suppress(FileNotFoundError):
                (dst / name).unlink()
        elif name in kept and os.path.lexists(dst / name) and _is_one(aside / name, dst / name):
            (aside / name).unlink()  # after a power cut a file may have both names
        elif name in kept:
            _move(aside / name, dst / name, synced=True)
    if kept:
        sync_directories(dst)


def _is_one(one: Path, other: Path) -> bool:
    return os.path.samestat(one.lstat(), other.lstat())


def _record(dst: Path, uid: int) -> tuple[str, Sequence[str], Sequence[str]]:
    """Return the name of the work directory, the files, and those that they replace."""
    file = dst / PENDING
    if os.lstat(file).st_uid != uid:
        raise _cannot(dst, f"is half published by user {os.lstat(file).st_uid}")
    try:
        value: dict[str, Any] = parse_object(read_plain(file) or b"")
        work, files, replaced = str(value["work"]), value["files"], value["replaced"]
        names = [*files, *replaced]
    except (ValueError, KeyError, TypeError) as error:
        raise _cannot(dst, f"is half published, and {PENDING} cannot be read") from error
    sound = work.startswith(f".{dst.name}.ckptmap-") and "/" not in work
    if not sound or not all(isinstance(name, str) and _is_below(name) for name in names):
        raise _cannot(dst, f"is half published, and {PENDING} names files elsewhere")
    return work, files, replaced


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _cannot(dst: Path, problem: str) -> DestinationError:
    return DestinationError(
        "CKM304", f"{dst}: {problem}", "remove it, or choose another destination"
    )


def _remove_empty_folders(directory: Path) -> None:
    """Remove the empty directories below a directory, not itself."""
    for folder, _, _ in os.walk(directory, topdown=False, onerror=raised):
        if folder != str(directory) and stat.S_ISDIR(os.lstat(folder).st_mode):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
