"""What lies in a destination."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ckptmap


def tree(dst: Path) -> dict[str, str]:
    """Content of a destination, by file."""
    files = [dst] if dst.is_file() else sorted(dst.iterdir())
    return {
        file.name if dst.is_dir() else "": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def leftovers(folder: Path) -> list[str]:
    return sorted(name.name for name in folder.iterdir() if "ckptmap" in name.name)


def flip_byte_of(checkpoint: Path, name: str) -> None:
    """Flip a byte of a tensor in a checkpoint, where its headers say that it lies."""
    with ckptmap.open(checkpoint) as ckpt:
        chunk = next(iter(ckpt[name].beneath)).chunks[0]
    file, offset = Path(chunk.region.file), chunk.region.offset
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
