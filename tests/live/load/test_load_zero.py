"""Training goes on from a checkpoint of DeepSpeed: in a plain model, and under FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptmap
from tests.corpus.ranks import run_ranks
from tests.golden.deepspeed.make_deepspeed import RUNS, Run, unpack
from tests.support.same_tensors import assert_same
from tests.support.zero_resume import groups_in_order, one_step, resumed_by_hand, untrained

ADAMW = [run for run in RUNS if run.optimizer == "AdamW" and not run.exclude_frozen]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    unpack(folder)
    return folder


@pytest.mark.parametrize("run", ADAMW, ids=lambda run: run.name)
def test_the_next_step_is_that_of_torch(samples: Path, run: Run) -> None:
    model = untrained(run)
    optimizer = torch.optim.AdamW(groups_in_order(run, model), lr=0.5)
    report = ckptmap.load(samples / run.name, model, optimizer)
    assert report.state is not None and not report.state.initialised
    expected, by_hand = resumed_by_hand(samples / run.name, run)
    if "elastic" in run.name:  # that form has no hyper-parameters: the optimizer keeps its own
        for group in by_hand.param_groups:
            group.update(lr=0.5, weight_decay=0.7)
    one_step(model, optimizer)
    one_step(expected, by_hand)
    for name, value in model.named_parameters():
        assert_same(value.detach(), expected.get_parameter(name).detach(), name)


def test_the_next_step_under_fsdp2(samples: Path) -> None:
    names = ["z1w3", "z2w2", "z3w3", "z2-round-robin", "z3-universal"]
    run_ranks("tests.ranks.resume_zero", 2, [str(samples), *names], timeout=300)
