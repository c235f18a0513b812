"""Buffers that FSDP1's MixedPrecision casts before the first forward go on bit for bit, on two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.corpus.ranks import run_ranks


def test_buffers_that_fsdp1_casts(tmp_path: Path) -> None:
    run_ranks("tests.ranks.resume_fsdp1_buffers", 2, [str(tmp_path)], timeout=120)
