"""A CheckpointManager in frameworks: the examples run as they are, each against a run that was not
stopped. The trainer of torchtitan is an imitation of its calls."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import ArgumentError, LoadError
from ckptmap.integrations import manager, trainer_manager
from ckptmap.integrations.manager import TitanManager, trainer_callback
from ckptmap.integrations.transformers import resume
from tests.corpus.ranks import run_ranks
from tests.ranks.trainer_manager import StopAt, trainer, weights
from tests.support.paths import ROOT

EXAMPLES = {
    "manager_trainer": "the same weights after step 8",
    "manager_accelerate": "save_state's checkpoint_1 is restored",
    "manager_lightning": "resumed at step 6, the same weights after step 12",
    "manager_torchtitan": "resumed at step 5, the same weights after step 9",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "integrations"))
    monkeypatch.chdir(tmp_path)
    importlib.import_module(name).main(tmp_path)
    assert EXAMPLES[name] in capsys.readouterr().out


def test_parts_of_a_model(tmp_path: Path) -> None:
    """Stages of a pipeline keep the FQNs of the whole model."""
    manager = ckptmap.CheckpointManager(tmp_path / "parts")
    with pytest.raises(ArgumentError, match="is empty, expected a model"):
        TitanManager(manager, [])
    with pytest.raises(LoadError, match="weight is in parts 0 and 1, expected it in one"):
        TitanManager(manager, [nn.Linear(2, 2), nn.Linear(2, 2)]).save(1, last_step=True)
    whole = nn.ModuleDict({str(n): nn.Linear(2, 2) for n in range(3)})
    parts = [nn.ModuleDict({n: whole[n] for n in names}) for names in (("0", "2"), ("1",))]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]
    stages = TitanManager(manager, parts, optimizers, exact=True)
    assert stages.save(2, last_step=True)
    with torch.no_grad():
        before = {name: param.clone() for name, param in whole.named_parameters()}
        for param in whole.parameters():
            param.zero_()
    assert stages.load() and stages.report is not None and stages.report.inexact == ()
    assert all(torch.equal(before[name], param) for name, param in whole.named_parameters())
    with ckptmap.open(manager.latest()) as ckpt:
        assert {*ckpt} == {*before}


def test_a_titan_manager_of_one_model(tmp_path: Path) -> None:
    manager = ckptmap.CheckpointManager(tmp_path)
    one = TitanManager(manager, [nn.Linear(2, 2)])
    assert not one.load() and one.save(3, last_step=True) and one.load(3)
    assert one.report is not None and one.report.step == 3


def test_a_container_of_optimizers_is_saved_as_what_is_in_it(tmp_path: Path) -> None:
    """torchtitan's is an optimizer itself, whose own state is empty."""
    model = nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer.optimizers = [inner]  # type: ignore[attr-defined]
    model(torch.ones(2)).sum().backward()
    inner.step()
    ckptmap.save(tmp_path / "c", model, outer).wait()
    with ckptmap.open(tmp_path / "c") as ckpt:
        assert {"exp_avg", "exp_avg_sq"} <= {*ckpt.optimizer["weight"]}


EVALUATIONS: dict[str, dict[str, Any]] = {
    "at the step, for the scheduler": {
        "eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0}, "metric_for_best_model": "eval_loss",
    },
    "at the end of its epoch": {"eval_strategy": "epoch"},
}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATIONS)
def test_trainer_saves_after_the_evaluation_of_a_step(name: str, tmp_path: Path) -> None:
    """Evaluation draws random numbers and steps a scheduler: a run that goes on from the step does not do it again."""
    options = {"gradient_accumulation_steps": 1, "max_steps": 14, **EVALUATIONS[name]}
    whole = trainer(tmp_path, 0, **options)
    whole.train()
    rules: Any = {"keep": 1, "keep_best": ("eval_loss", "min")}
    with ckptmap.CheckpointManager(tmp_path / "runs", **rules) as manager:
        trainer(tmp_path, 0, trainer_callback(manager), StopAt(10), **options).train()
    latest = manager.latest()
    assert latest is not None and latest.name == "step-10"
    again = trainer(tmp_path, 1, **options)
    notes = resume(again, latest, load_options={"exact": True}).report.notes
    assert not notes, "Trainer sets the mode of the model itself"
    truth, found = weights(whole), weights(again)
    assert all(torch.equal(truth[name], found[name]) for name in truth)
    losses = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    assert losses == [e["eval_loss"] for e in again.state.log_history if "eval_loss" in e]
    with ckptmap.open(latest) as ckpt:
        assert ckpt.extra["manager"]["metrics"]["eval_loss"] in losses


def test_a_trainer_without_the_method_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a private one, which a release may rename."""
    monkeypatch.setattr(trainer_manager, "AFTER", "_renamed")
    with ckptmap.CheckpointManager(tmp_path / "runs") as manager:
        one = trainer(tmp_path, 0, trainer_callback(manager), max_steps=1)
        with pytest.raises(LoadError, match=r"has no Trainer\._renamed"):
            one.train()


def test_trainer_on_two_ranks(tmp_path: Path) -> None:
    """Under DDP, in the middle of an epoch, with evaluation: tests/ranks/trainer_manager.py."""
    run_ranks("tests.ranks.trainer_manager", 2, [str(tmp_path)], timeout=240)


@pytest.mark.parametrize("version", [1, 2])
def test_trainer_under_fsdp(version: int, tmp_path: Path) -> None:
    """By accelerate's plugins, bit for bit: tests/ranks/trainer_fsdp.py."""
    run_ranks("tests.ranks.trainer_fsdp", 2, [str(tmp_path), str(version)], timeout=240)


def test_trainer_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """3 -> 2 and 3 -> 1 with as many rows a step: tests/ranks/trainer_worlds.py."""
    run_ranks("tests.ranks.trainer_worlds", 3, ["save", str(tmp_path)], timeout=240)
    for world in (2, 1):
        run_ranks("tests.ranks.trainer_worlds", world, ["resume", str(tmp_path)], timeout=240)


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitans_own_trainer_on_two_ranks(tmp_path: Path) -> None:
    """Under FSDP2, bit for bit, and from what it saved itself, where q, k and v of the fused weights have names of their
    own beside moments that have not: tests/ranks/torchtitan_trainer.py."""
    for phase in ("whole", "first", "again", "theirs", "restored"):
        run_ranks("tests.ranks.torchtitan_trainer", 2, [str(tmp_path), phase], timeout=240)


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_parts_of_torchtitan_on_two_ranks(tmp_path: Path) -> None:
    """Its containers, its data loader, and what its own manager saved: tests/ranks/torchtitan_parts.py."""
    run_ranks("tests.ranks.torchtitan_parts", 2, [str(tmp_path)], timeout=240)


def test_lightning_is_taken_from_the_package_that_the_program_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning comes as `lightning` and as `pytorch_lightning`; one of them may be all that is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "lightning" or None)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert manager._lightning() == "lightning.pytorch"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", sys)
    assert manager._lightning() == "pytorch_lightning"
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="Lightning is not installed"):
        manager._lightning()
