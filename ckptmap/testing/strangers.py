"""Paths that belong to no adapter: one that claims them would take other formats' checkpoints."""

from __future__ import annotations

import random
from pathlib import Path


def strangers(folder: Path) -> list[Path]:
    """Make files and directories below `folder` that are empty, random or text, and return them."""
    draw = random.Random(1)
    (folder / "empty_dir").mkdir()
    for name in ("random_dir", "text_dir"):
        (folder / name).mkdir()
    for number in range(5):
        name = "".join(draw.choices("abcdefgh", k=8))
        (folder / "random_dir" / name).write_bytes(draw.randbytes(100 + number))
    (folder / "text_dir" / "README.md").write_text("# nothing\n")
    (folder / "text_dir" / "notes.json").write_text('{"a": 1}\n')
    (folder / "empty_file").write_bytes(b"")
    (folder / "random_file").write_bytes(draw.randbytes(600))
    (folder / "page.html").write_text("<!doctype html><title>404</title>")
    return sorted(folder.iterdir())
