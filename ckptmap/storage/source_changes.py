"""Refuse source files that changed after they were opened.

Headers are read at once, values much later. If another process writes the file in between, the
headers do not describe the bytes any more.
"""

from __future__ import annotations

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
