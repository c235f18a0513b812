"""Refuse source files that changed after they were opened.

Headers are read at once, values much later. If another process writes the file in between, the
headers do not describe the bytes any more.

A run that is continued must have the very files that the earlier run read. The earlier run may have
been killed before it knew that a file was damaged; what it wrote would stay, though a good copy of
the same size and time has taken the place of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ckptmap.errors import RunError
from ckptmap.protocols.file_systems import Fingerprint, Mounts


def fingerprints(files: Iterable[str], mounts: Mounts) -> dict[str, Fingerprint]:
    """Return the fingerprint of each file; a missing file is left out, and refused when it is read."""
    by_file = {}
    for file in files:
        try:
            by_file[file] = Fingerprint.of(file, mounts)
        except OSError:
            continue
    return by_file


def file_states(files: Iterable[str], mounts: Mounts) -> str:
    """Return a digest of what changes whenever somebody writes, replaces or restores one of the files.

    That is the inode and the time of change (ctime), which no program can set. It also changes with
    a mode or a hard link: a run begins anew then, which costs time and nothing else. Paths are left
    out, since a directory may be moved, and so are mounted files, whose fingerprint names the content.
    """
    from hashlib import sha256

    seen = sha256()
    for file in sorted(files):
        if mounts.file_system_of(file) is not None:
            continue
        try:
            state = os.stat(file)
        except OSError:  # whoever reads it says so
            continue
        seen.update(f"{state.st_ino} {state.st_ctime_ns}\n".encode())
    return seen.hexdigest()


def require_unchanged(before: Mapping[str, Fingerprint], mounts: Mounts, hint: str) -> None:
    """Raise RunError CKM308 for the first file whose fingerprint is not the one in `before`."""
    now = fingerprints(before, mounts)
    for file, then in before.items():
        current = now.get(file)
        if current != then:
            raise RunError(
                "CKM308",
                f"{file}: changed while it was read: {then.nbytes} bytes when opened, now "
                + (f"{current.nbytes}, written anew" if current else "gone"),
                hint,
            )
