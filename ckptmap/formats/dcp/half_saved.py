"""Tell a save into the directory of an earlier one that was killed half way: data of two saves under one `.metadata`.

torch writes data files in place, and `.metadata` last. So a killed save leaves the `.metadata` of the save before beside
some of its own data files. Where both saves are of one model, every item lies where `.metadata` says, and only the times
of the files tell.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from ckptmap.core.formatting import some

MIN_GAP_S = 60
"""Seconds between two saves of a run, at least."""
TIMES_LONGER = 2
"""The time between two saves is longer than each of them takes by this factor. Files that were copied follow one another,
so their times do not look so."""
HINT = (
    "the file is damaged or of another save than .metadata, as a save into this directory leaves it that was killed: copy"
    " the directory again, or use an earlier checkpoint"
)


def half_saved(files: Collection[str], metadata: str) -> tuple[str, ...]:
    """Return a note where some data files were written long after `.metadata`, and others before it."""
    try:
        written = {file: os.stat(file).st_mtime for file in files}
        end = os.stat(metadata).st_mtime
    except OSError:  # whoever reads them says so
        return ()
    later = {file: time for file, time in written.items() if time > end}
    if not later or len(later) == len(written):
        return ()
    first, last = min(later.values()), max(later.values())
    took = max(end - min(written.values()), last - first)
    if first - end < max(MIN_GAP_S, TIMES_LONGER * took):
        return ()
    names = some([os.path.basename(file) for file in later], 2)
    return (
        f"{names}: written {first - end:,.0f} s after .metadata: a save over this checkpoint seems to have been killed half"
        " way, and values of two saves are mixed; use an earlier checkpoint",
    )
