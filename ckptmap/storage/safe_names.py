"""Check file names that somebody else gives: an index file, `.metadata`, a repository on the Hub.

They must stay inside the directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath

from ckptmap.errors import SourceError


def inside(directory: str, name: str, where: str, also: Sequence[str] = ()) -> str:
    """Return the path of `name` in `directory`; separators of both kinds and symlinks are checked.

    `where` is the file that gives the name. A symlink may lead into `directory` or one of `also`
    (real paths). Raises SourceError CKM116. The name is parsed as Windows would, so that one check
    refuses `/x`, `C:x`, `\\\\server\\x` and `..\\x` on every system, as huggingface_hub does.
    """
    windows = PureWindowsPath(name)
    if not name or "\0" in name or windows.drive or windows.root or ".." in windows.parts:
        raise _escapes(where, name, "expected a relative path without '..'")
    path = str(Path(directory) / name)
    try:
        if Path(name).parts and not _goes_through_link(directory, name):
            return path
        real = os.path.realpath(path)
    except ValueError as error:  # a lone surrogate: no file can have this name
        raise _escapes(where, name, "expected a name that a file can have") from error
    for root in (os.path.realpath(directory), *also):
        if real.startswith(root.rstrip("/") + "/"):
            return path
    raise _escapes(where, name, f"it is a symlink to {real}")


def _goes_through_link(directory: str, name: str) -> bool:
    """Return whether `name` or a folder in it is a symlink; False where nothing has this path. Resolving the
    whole path instead asks for each of its folders, and an index may list 100,000 files."""
    path = directory
    for part in Path(name).parts:
        path = os.path.join(path, part)
        try:
            if stat.S_ISLNK(os.lstat(path).st_mode):
                return True
        except OSError:
            return False
    return False


def is_file(path: str | Path) -> bool:
    """Return whether a file has the path; False for a name that no file can have.

    For names that a file gives: `Path.is_file` raises OSError for a name of 300 characters.
    """
    return os.path.isfile(path)


def _escapes(where: str, name: str, why: str) -> SourceError:
    return SourceError(
        "CKM116",
        f"{where}: the file name {name!r} leads out of the directory: {why}",
        "copy the file into the directory, or do not trust this checkpoint",
    )


def problem_in_repository(name: str) -> str:
    """Return what keeps a name from being a file of a repository on the Hub; "" for a sound name.

    Git refuses a folder `.git` in every spelling that some file system takes for it: a file
    `.git/hooks/x` would run at the next command of git.
    """
    windows = PureWindowsPath(name)
    if not name or "\0" in name or "\\" in name:
        return "is empty, or has a NUL or a backslash"
    if windows.drive or windows.root or any(part in ("", ".", "..") for part in name.split("/")):
        return "is no path inside the repository"
    if any(part.rstrip(". ").casefold() in _GIT for part in name.split("/")):
        return "lies in .git, whose files git runs"
    return ""


_GIT = (".git", "git~1")
"""The folder of git, and the short name that Windows gives it."""


def blobs_of(directory: str) -> tuple[str, ...]:
    """Return the blob folder to which a Hugging Face cache snapshot may link: `snapshots/REV` ->
    `blobs`, also for folders below REV."""
    path = Path(directory).absolute()
    for parent in path.parents:
        if parent.name == "snapshots":
            return (os.path.realpath(parent.parent / "blobs"),)
    return ()
