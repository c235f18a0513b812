"""Compare what lies in an output directory with the names of the files that were planned."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from ckptmap.core.printable import quote
from ckptmap.errors import RunError
from ckptmap.storage.own_files import kind_of, odd_file, walk


def require_listing(directory: Path, files: Collection[str], complete: bool) -> None:
    """Raise RunError CKM401 for the first thing in a directory, at any depth, that is not planned.

    `files` are paths relative to the directory. They must be regular files with one name, and only
    their parent directories may lie beside them. With `complete` none of them may be missing.
    """
    folders = {str(up) for name in files for up in PurePosixPath(name).parents} - {"."}
    missing = set(files)
    for path, status in sorted(walk(directory)):
        name = Path(path).relative_to(directory).as_posix()
        if stat.S_ISDIR(status.st_mode) and name in folders:
            continue
        if name in files:
            problem = odd_file(status)
        else:
            problem = f"is {kind_of(status.st_mode)} that the plan does not name"
        if problem:
            raise RunError(
                "CKM401",
                f"{directory}: {name!r} {problem}",
                "nothing was published; see who put it there, remove it, then run the same command"
                f" again: rm -r {quote(os.fspath(path))}",
            )
        missing.discard(name)
    if complete and missing:
        raise RunError(
            "CKM401",
            f"{directory}: {min(missing)!r} is missing ({len(missing)} of {len(files)} files)",
            "nothing was published; see who removed it, then run the same command again",
        )
