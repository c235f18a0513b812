"""What lies in a destination."""

from __future__ import annotations

import hashlib
from pathlib import Path


def tree(dst: Path) -> dict[str, str]:
    """Content of a destination, by file."""
    files = [dst] if dst.is_file() else sorted(dst.iterdir())
    return {
        file.name if dst.is_dir() else "": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def leftovers(folder: Path) -> list[str]:
    return sorted(name.name for name in folder.iterdir() if "ckptmap" in name.name)
