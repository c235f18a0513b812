"""Is a source still what it was when it was opened?

Headers are read at once and values much later: a file that was written anew in between gives bytes
that its headers do not describe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptmap.errors import RunError
from ckptmap.storage.file_systems import Fingerprint


def fingerprints(files: Iterable[str]) -> dict[str, Fingerprint]:
    """Of the files that are there; one that is not says so when it is read."""
    found = {}
    for file in files:
        try:
            found[file] = Fingerprint.of(file)
        except OSError:
            continue
    return found


def require_unchanged(before: Mapping[str, Fingerprint], hint: str) -> None:
    """Raises RunError CKM308 for a file that is not as it was."""
    now = fingerprints(before)
    for file, then in before.items():
        found = now.get(file)
        if found != then:
            raise RunError(
                "CKM308",
                f"{file}: changed while it was read: {then.nbytes} bytes when opened, now "
                + (f"{found.nbytes}, written anew" if found else "gone"),
                hint,
            )
