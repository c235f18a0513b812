"""float8 training by torchao and compiled models on three ranks, with optimizers of full and of low bits, go on
bit for bit; two ranks take what three saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.ranks import run_ranks

pytest.importorskip("torchao.float8")
MODULE = "tests.ranks.resume_float8"


def test_on_three_ranks_and_then_on_two(tmp_path: Path) -> None:
    run_ranks(MODULE, 3, [str(tmp_path)], timeout=400)
    run_ranks(MODULE, 2, [str(tmp_path), "from", "3"], timeout=400)
