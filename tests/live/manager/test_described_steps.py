"""A manager's save opens no checkpoint that is known; one that was written by another program is opened anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import ckptmap
from ckptmap.live.manager import described_steps
from ckptmap.live.manager.described_steps import DescribedSteps
from ckptmap.operations.step_directories import MANAGER, StepDirectory, describe_step, find_steps


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that are opened."""
    found: list[str] = []

    def describe(one: StepDirectory) -> object:
        found.append(one.path.name)
        return describe_step(one)

    monkeypatch.setattr(described_steps, "describe_step", describe)
    return found


def test_a_save_opens_no_checkpoint_of_before(tmp_path: Path, opened: list[str]) -> None:
    model = nn.Linear(2, 2)
    with ckptmap.CheckpointManager(tmp_path, background=False, keep=2) as manager:
        for step in (1, 2):
            manager.save(step, model)
            manager.wait()
        assert opened == ["step-1", "step-1", "step-2"], (
            "after each save all are opened, for what is removed; before it none"
        )
        opened.clear()
        # Another program saves a later step meanwhile, and this one's number is above it.
        other = {MANAGER: {"metrics": {}, "number": 70}}
        ckptmap.save(tmp_path / "step-5", model, step=5, extra=other).wait()
        manager.save(4, model)
        assert opened[0] == "step-5"
        with ckptmap.open(tmp_path / "step-4") as ckpt:
            assert ckpt.extra[MANAGER]["number"] == 71  # type: ignore[index]


def test_what_is_written_anew_is_not_known(tmp_path: Path) -> None:
    def saved(number: int) -> None:
        extra = {MANAGER: {"metrics": {}, "number": number}}
        ckptmap.save(
            tmp_path / "step-1", nn.Linear(2, 2), step=1, extra=extra, overwrite=True
        ).wait()

    saved(1)
    known, (found,) = DescribedSteps(), find_steps(tmp_path)
    assert known.of(found).number == 1
    known.anew([found])
    saved(2)
    assert known.of(found).number == 2
    known.anew([found])
    (tmp_path / "step-1/.metadata").write_bytes(b"")
    assert known.of(found).problem
    assert known.anew([found])[0].problem and known.of(found).problem
