"""Saves that torch_checkpointing's own manager makes, once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpus.ranks import run_ranks
from tests.support.torch_checkpointing_cases import CASES


@pytest.fixture(scope="session")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """Return a function that returns the folder of a case: `step-10`, `step-20` and `truth.pt`."""
    pytest.importorskip("torch_checkpointing")
    made: dict[int, Path] = {}

    def folder(world: int, name: str) -> Path:
        if world not in made:
            made[world] = tmp_path_factory.mktemp(f"torch_checkpointing_{world}")
            run_ranks(
                "tests.ranks.torch_checkpointing_saves", world, [str(made[world])], timeout=400
            )
        assert name in CASES[world]
        return made[world] / name

    return folder
