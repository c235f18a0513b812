"""How state is placed is decided by what it was when it was saved, not by its shape."""

from __future__ import annotations

from pathlib import Path

from tests.corpus.ranks import run_ranks


def test_ranks(tmp_path: Path) -> None:
    """Saved by two ranks, loaded by two and by three: tests/ranks/resume_placement.py."""
    for part, world in (("save", 2), ("same", 2), ("other", 3)):
        run_ranks("tests.ranks.resume_placement", world, [part, str(tmp_path)], timeout=120)
