"""A live AdamW goes on with the optimizer state of every checkpoint of the corpus."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptmap
from tests.corpus import CASES, Corpus
from tests.corpus.writers_directories import sample
from tests.live.load.test_load_corpus import LOADABLE, live

WITH_STATE = [name for name in LOADABLE if CASES[name].optimizer]


@pytest.mark.parametrize("name", WITH_STATE)
def test_state_of_every_case(name: str, corpus: Corpus) -> None:
    case = corpus[name]
    model = live(case, "cpu")
    named = {
        fqn: param.requires_grad_()
        for fqn, param in model.named_parameters()
        if fqn in case.optimizer
    }
    optimizer = torch.optim.AdamW(named.values(), lr=123.0)
    with ckptmap.open(case.path) as ckpt:
        if ckpt.optimizer_by_index:
            pytest.skip("nothing says which parameter is which")
        report = ckptmap.load(ckpt, model, optimizer)
    assert report.state is not None and not report.state.initialised, report
    assert optimizer.param_groups[0]["lr"] != 123.0 or any(
        "kept" in s for s in report.state.settings
    )
    for fqn, state in case.optimizer.items():
        found = optimizer.state[named[fqn]]
        for key, want in state.items():
            assert torch.equal(found[key], want.to(found[key].dtype)), (fqn, key)
    for param in named.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()


def test_the_corpus_has_optimizer_state_of_several_containers() -> None:
    writers = {CASES[name].container for name in WITH_STATE}
    assert len(WITH_STATE) > 10 and {"torch", "dcp"} <= writers


# ------------------------------------------------------------------------------- directories

FRAMEWORKS = {
    "accelerate_fsdp2_w2": "",
    "trainer_ddp_w2": "checkpoint-2",
    "trainer_fsdp_sharded_w2": "checkpoint-2",
    "verl_w2": "actor",
}
SCHEDULED = {"accelerate_fsdp2_w2": 7, "verl_w2": 0}
"""Those with a StepLR of 3 steps: its last epoch."""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_directories_of_accelerate_and_trainer_resume(
    name: str, framework_directories: Path
) -> None:
    """The directory as they leave it, into a live model and its AdamW."""
    case = sample(framework_directories, name)
    model = live(case, "cpu")
    named = {
        fqn: param.requires_grad_()
        for fqn, param in model.named_parameters()
        if fqn in case.optimizer
    }
    optimizer = torch.optim.AdamW(named.values(), lr=123.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9) if name in SCHEDULED else None
    if scheduler is not None:
        scheduler.last_epoch = 5
    report = ckptmap.load(case.path / FRAMEWORKS[name], model, optimizer, scheduler)
    assert scheduler is None or (scheduler.last_epoch, scheduler.step_size) == (SCHEDULED[name], 3)
    assert report.state is not None and not report.state.initialised, report
    for fqn, want in case.truth.items():
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}.get(fqn)
        assert found is None or torch.equal(found.detach(), want), fqn
    for fqn, state in case.optimizer.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[named[fqn]][key], state[key]), (fqn, key)
    assert optimizer.param_groups[0]["lr"] != 123.0
    decay = optimizer.param_groups[0]["weight_decay"]  # theirs were two groups, ours is one
    assert any(text.endswith(f"kept {decay}") for text in report.state.settings), report
