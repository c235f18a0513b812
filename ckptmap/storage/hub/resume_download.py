"""Download a whole file from the Hub into a directory; continue where a killed run stopped.

huggingface_hub itself continues after a lost connection. But since 1.18 a new process begins each
file again, and the bytes of a killed process are lost. So this module calls its `http_get`, which
takes an offset to continue from.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptmap.storage.hub.entry import Entry


def over_http(entry: Entry) -> bool:
    """Return True if the file is downloaded by HTTP ranges.

    A file on xet is downloaded by hf_xet if it is installed: in parallel parts, always from the
    start.
    """
    from huggingface_hub.file_download import is_xet_available  # type: ignore[attr-defined]

    return not (entry.xet and is_xet_available())


def continued(repo: str, commit: str, entry: Entry, directory: Path) -> str:
    """Download a file to its path below `directory`, and return that path; the hash is not checked.

    A partial download lies beside it, named by its digest, and is continued. Raises the errors of
    huggingface_hub.
    """
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
