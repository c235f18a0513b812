"""A CheckpointManager in frameworks: the examples run as they are, each against a run that was not
stopped. The trainer of torchtitan is an imitation of its calls."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import ArgumentError
from ckptmap.integrations.manager import TitanManager
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


def test_stages_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    manager = ckptmap.CheckpointManager(tmp_path)
    with pytest.raises(ArgumentError, match="has 2 parts, expected one"):
        TitanManager(manager, [nn.Linear(2, 2), nn.Linear(2, 2)])
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
