"""`ckptmap.load` puts what torch_checkpointing saved into models of other wrappers and worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpus.ranks import run_ranks

Saves = Callable[[int, str], Path]
PROGRAM = "tests.ranks.torch_checkpointing_loads"


def loads(folder: Path, step: int, world: int, optimizer: str, *kinds: str) -> None:
    outputs = run_ranks(
        PROGRAM, world, [str(folder), f"step-{step}", optimizer, *kinds], timeout=400
    )
    assert outputs[0].stdout.splitlines() == [f"{kind} same" for kind in kinds]


@pytest.mark.parametrize("step", [10, 20])
def test_the_same_world_and_its_own_values(saves: Saves, step: int) -> None:
    loads(saves(2, "fsdp2"), step, 2, "adamw", "fsdp2", "fsdp1")


def test_another_world(saves: Saves) -> None:
    loads(saves(4, "tp_safe"), 10, 1, "adamw", "plain", "fsdp2")


def test_more_ranks_than_it_was_saved_by(saves: Saves) -> None:
    loads(saves(2, "layouts"), 10, 4, "sgd", "hsdp", "fsdp1")
