"""Optimizer state by index, as accelerate and Trainer save it: `inspect` names it as `plan` does, and what
names nothing says what would."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main

import ckptmap
from tests.support.mapping_configs import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `Accelerator.save_state` writes in one process, and the model's directory beside it."""
    from accelerate import Accelerator

    folder = tmp_path_factory.mktemp("accelerate")
    accelerator = Accelerator(cpu=True)
    model = TINY["llama"].build()
    model.save_pretrained(folder / "base")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    accelerator.save_state(folder / "run", safe_serialization=True)
    return folder


def inspected(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main(["inspect", *map(str, args)]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if "  optimizer  " in line)


def test_inspect_names_state_by_the_config_as_plan_does(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "a config.json would (--like PATH)" in inspected(capsys, run / "run")
    named = "state of 21 parameters by name: step, exp_avg, exp_avg_sq"
    assert named in inspected(capsys, run / "run", "--like", run / "base")
    shutil.copytree(run / "run", tmp_path / "with")
    shutil.copy(run / "base/config.json", tmp_path / "with")
    assert named in inspected(capsys, tmp_path / "with")
    plan = ckptmap.plan(tmp_path / "with", "full")
    assert not plan.unresolved and len(plan.steps) == 84


def hint(source: Path, **options: Any) -> str:
    (item,) = ckptmap.plan(source, "full", **options).unresolved
    return item.hint


def test_what_names_nothing_says_what_would(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config first; transformers where it is missing; another config where it does not fit."""
    assert hint(run / "run").startswith("give the model's config.json with --config-from PATH, or")
    assert not ckptmap.plan(run / "run", "full", config_from=run / "base").unresolved
    TINY["qwen2"].build().save_pretrained(tmp_path / "other")
    assert "has not these parameters" in hint(run / "run", config_from=tmp_path / "other")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "ckptmap.planning.optimizer_state.find_spec",
        lambda name: None if name == "transformers" else find(name),
    )
    wrong = hint(run / "run", config_from=tmp_path / "other")
    assert wrong.startswith("pip install transformers, whose class config.json names")
