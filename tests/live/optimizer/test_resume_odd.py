"""Optimizers and schedulers that few tests use go on bit for bit, on one rank and on two, and from two on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.ranks import run_alone, run_ranks

MODULE = "tests.ranks.resume_odd"


def test_alone(tmp_path: Path) -> None:
    run_alone(MODULE, [str(tmp_path), "plain"], timeout=120)


def test_on_two_ranks_and_then_on_one(tmp_path: Path) -> None:
    run_ranks(MODULE, 2, [str(tmp_path), "fsdp2", "ddp"], timeout=240)
    run_alone(MODULE, [str(tmp_path), "from", "fsdp2"], timeout=120)


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    """By torch.distributed.pipelining, with an optimizer each: tests/ranks/pipeline_stages.py."""
    stages = "tests.ranks.pipeline_stages"
    run_ranks(stages, 2, [str(tmp_path), "same", "others", "part"], timeout=240)
    run_ranks(stages, 4, [str(tmp_path), "four"], timeout=240)
    run_alone(stages, [str(tmp_path), "alone"], timeout=120)


@pytest.mark.parametrize("world", [2, 4])
def test_extra_state_of_modules_on_ranks(world: int, tmp_path: Path) -> None:
    """Of the stages of a pipeline, and of replicas that differ: tests/ranks/extra_state.py."""
    states = "tests.ranks.extra_state"
    run_ranks(states, world, [str(tmp_path), "stages"], timeout=240)
    run_ranks(states, world, [str(tmp_path), "replicas"], timeout=240)
    run_alone(states, [str(tmp_path), "alone", str(world)], timeout=120)
