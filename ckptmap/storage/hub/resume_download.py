"""A whole file into a directory of the caller's, continued where a killed run left it.

huggingface_hub itself continues a connection that is cut; since 1.18 each of its processes begins
a file anew, and what a killed one had is lost. Its `http_get` takes where to go on from.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptmap.storage.hub.entry import Entry


def over_http(entry: Entry) -> bool:
    """Does it come by HTTP ranges? What xet holds comes by hf_xet, where that is there: it brings
    parts of a file in parallel, and begins a file anew."""
    from huggingface_hub.file_download import is_xet_available  # type: ignore[attr-defined]

    return not (entry.xet and is_xet_available())


def continued(repo: str, commit: str, entry: Entry, directory: Path) -> str:
    """The file at its path below `directory`, its hash unchecked. What came so far lies beside it
    by a name of its content, and is continued. Raises what huggingface_hub raises."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    file = directory / entry.path
    part = file.with_name(f".{entry.digest[:16]}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as stream:
        if stream.tell() > entry.nbytes:
            stream.seek(0)
            stream.truncate()
        http_get(
            hf_hub_url(repo, entry.path, revision=commit), stream, resume_size=stream.tell(),
            headers=build_hf_headers(), expected_size=entry.nbytes,
            displayed_filename=file.name,
        )  # fmt: skip
    os.replace(part, file)
    return str(file)
