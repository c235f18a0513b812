"""`CheckpointManager`: what is saved when, kept, found again, passed over, and saved at a signal."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptmap
from ckptmap.core.log import log
from ckptmap.errors import ArgumentError, CkptmapError, LoadError, SourceError
from ckptmap.live.manager.retention import Retention
from ckptmap.operations.list_steps import list_steps
from ckptmap.operations.step_directories import SavedStep
from tests.corpus.ranks import run_ranks
from tests.support.files import flip_byte_of
from tests.support.forked import run_code
from tests.support.resume_model import net


def model(value: float) -> nn.Module:
    made = nn.Linear(2, 2)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("background", [True, False])
def test_a_run(background: bool, tmp_path: Path) -> None:
    """Due steps alone are saved; kept are the newest two, each 40th and the one with the least loss."""
    rules: Any = {"every": 10, "keep": 2, "keep_every": 40, "keep_best": ("loss", "min")}
    with ckptmap.CheckpointManager(tmp_path, background=background, **rules) as manager:
        for step in range(1, 91):
            loss = abs(step - 20) + 0.5
            handle = manager.save(
                step, model(step), metrics={"loss": loss}, extra={"epoch": step // 30}
            )
            assert (handle is None) == bool(step % 10)
            manager.wait()
        assert manager.save(91, model(91), force=True) is not None
    assert names(tmp_path) == ["latest", "step-20", "step-40", "step-80", "step-90", "step-91"]
    assert (tmp_path / "latest").read_text() == "step-91\n"
    assert manager.steps() == [20, 40, 80, 90, 91]
    assert manager.latest() == tmp_path / "step-91"
    assert manager.best() == tmp_path / "step-20"

    for wanted, step in (("latest", 91), ("best", 20), (40, 40)):
        again = model(0)
        report = manager.restore(again, step=wanted)  # type: ignore[arg-type]
        assert report is not None and (report.step, report.skipped) == (step, ())
        assert (again.weight == step).all() and report.extra == (
            {"epoch": step // 30} if step != 91 else {}
        )


def test_nothing_to_restore_and_a_step_that_is_not_there(tmp_path: Path) -> None:
    manager = ckptmap.CheckpointManager(tmp_path / "runs")
    assert manager.restore(model(0)) is None and manager.latest() is None and manager.steps() == []
    for step, missing in ((4, "of step 4"), ("best", "with the metric of keep_best, which")):
        with pytest.raises(SourceError, match=f"expected a checkpoint {missing}.*found") as caught:
            manager.restore(model(0), step=step)
        assert "found steps none" in caught.value.message
        assert "nothing was saved there yet" in caught.value.hint
    (tmp_path / "runs/step-2").mkdir(parents=True)
    with pytest.raises(SourceError, match="found steps none") as caught:
        manager.restore(model(0), step=4)
    assert "step='latest' raises what is wrong" in caught.value.hint
    with pytest.raises(SourceError):
        manager.restore(model(0))
    (tmp_path / "runs/step-2").rmdir()
    manager.save(3, model(3))
    manager.wait()
    with pytest.raises(
        SourceError, match="expected a checkpoint of step 4, found steps 3"
    ) as caught:
        manager.restore(model(0), step=4)
    assert caught.value.hint == "restore one of these, as step=3, or step='latest'"
    with pytest.raises(SourceError, match="which this manager was not given, found steps 3"):
        manager.restore(model(0), step="best")
    best = ckptmap.CheckpointManager(tmp_path / "runs", keep_best=("loss", "min"))
    with pytest.raises(SourceError, match="that has the metric 'loss' of keep_best, found steps 3"):
        best.restore(model(0), step="best")
    with pytest.raises(LoadError, match="tensor does not fit"):
        manager.restore(nn.Linear(3, 2))


def test_what_is_damaged_or_incomplete_is_passed_over(tmp_path: Path) -> None:
    """A checkpoint of torch that lost its .metadata, one of ours with a flipped byte, then a good one."""
    manager = ckptmap.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, model(step))
    manager.wait()
    flip_byte_of(tmp_path / "step-2", "weight")
    dcp.save({"model": model(3).state_dict()}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    (tmp_path / "step-3" / ".metadata").unlink()
    again = model(0)
    report = manager.restore(again)
    assert report is not None and report.step == 1 and (again.weight == 1).all()
    assert [text.split(":")[0] for text in report.skipped] == ["step-3", "step-2"]
    assert "passed over: 2: step-3" in str(report)

    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(CkptmapError, match="weight"):
        manager.restore(model(0))


def test_only_what_a_manager_saved_is_removed_or_replaced(tmp_path: Path) -> None:
    ckptmap.save(tmp_path / "step-1", model(1), step=1).wait()
    dcp.save({"model": model(2).state_dict()}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    (tmp_path / "step-3").mkdir()
    manager = ckptmap.CheckpointManager(tmp_path, keep=1)
    for step in (4, 5, 5):  # a run that went back saves a step again
        manager.save(step, model(step))
    manager.wait()
    assert names(tmp_path) == ["latest", "step-1", "step-2", "step-3", "step-5"]
    manager.save(1, model(1))
    with pytest.raises(CkptmapError, match="step-1: exists"):
        manager.wait()


def test_directories_of_other_frameworks(tmp_path: Path) -> None:
    """By the names of Trainer and accelerate; `ckptmap ls` lists them, and what cannot be opened."""
    for name, value in (("checkpoint-100", 100.0), ("checkpoint_7", 7.0)):
        (tmp_path / f"of-{name}" / name).mkdir(parents=True)
        torch.save(model(value).state_dict(), tmp_path / f"of-{name}" / name / "pytorch_model.bin")
        manager = ckptmap.CheckpointManager(tmp_path / f"of-{name}")
        again = model(0)
        report = manager.restore(again)
        assert report is not None and report.step == int(value) and (again.weight == value).all()


def test_ls(tmp_path: Path) -> None:
    manager = ckptmap.CheckpointManager(tmp_path)
    manager.save(1, model(1), metrics={"loss": 0.25})
    manager.wait()
    (tmp_path / "step-2").mkdir()
    found = list_steps(tmp_path)
    assert str(found).splitlines() == [
        "step  setup  ranks  tensors  size  metrics",
        "1     fsdp2  1      2        24 B  loss 0.25",
        f"2     incomplete: {found.steps[1].problem}",
        "2 checkpoints; the newest is of step 1",
    ]
    rows: Any = found.to_json()["steps"]
    assert rows[0]["metrics"] == {"loss": 0.25} and rows[0]["is_managed"] and rows[1]["problem"]
    with pytest.raises(SourceError, match="holds no checkpoints of steps"):
        list_steps(tmp_path / "step-1")


def test_retention_without_metrics_and_with_equal_ones() -> None:
    def saved(step: int, **metrics: float) -> SavedStep:
        return SavedStep(step, Path(f"step-{step}"), metrics=metrics)

    rule = Retention(keep=1, keep_best=("accuracy", "max"))
    some = [
        saved(1, accuracy=0.5),
        saved(2, accuracy=0.5),
        saved(3),
        saved(4, accuracy=float("nan")),
    ]
    best = rule.best(some)
    assert best is not None and best.step == 2
    assert [one.step for one in rule.removable(some)] == [1, 3]
    assert Retention().removable(some) == [] and rule.best(some[2:]) is None


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"keep": 0}, "keep=0"),
        ({"keep_best": ("loss", "least")}, "keep_best="),
        ({"every": 0}, "every=0"),
        ({"timeout": -1}, "timeout=-1"),
    ],
)
def test_rules_that_mean_nothing(rules: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=text):
        ckptmap.CheckpointManager(tmp_path, **rules)
    with pytest.raises(ArgumentError, match="metrics"):
        ckptmap.CheckpointManager(tmp_path).save(1, model(1), metrics={"loss": "low"})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="metrics: is a float, expected numbers by name"):
        ckptmap.CheckpointManager(tmp_path).save(1, model(1), metrics=0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'SIGKILL': cannot be noted"):
        ckptmap.CheckpointManager(tmp_path).on_preemption("SIGKILL")
    with pytest.raises(ArgumentError, match=r"step=1000000000000000000"):
        ckptmap.CheckpointManager(tmp_path).save(10**18, model(1))  # no name of a step has it


def test_a_metric_that_is_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *args: said.append(text % args))
    with ckptmap.CheckpointManager(tmp_path, keep=1, keep_best=("loss", "min")) as manager:
        for step in (1, 2):
            manager.save(step, model(step), metrics={"Loss": 1.0 / step})
    assert said == [f"{tmp_path}: keep_best is by 'loss', metrics has ['Loss']"]


PREEMPTED = """
import os, signal, sys
from torch import nn
import ckptmap
manager = ckptmap.CheckpointManager(sys.argv[1], every=100)
manager.on_preemption()
for step in range(1, 10):
    if step == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    manager.save(step, nn.Linear(2, 2))
"""


def test_a_signal_saves_the_step_and_ends(tmp_path: Path) -> None:
    assert run_code(PREEMPTED, tmp_path) == 128 + signal.SIGTERM
    assert names(tmp_path) == ["latest", "step-5"]


def test_ranks(tmp_path: Path) -> None:
    """A signal to one rank, a damaged shard of one, rules and pointers: tests/ranks/manager.py."""
    run_ranks("tests.ranks.manager", 2, [str(tmp_path)], timeout=240)
    again = net(1)  # one process goes on where two have saved
    optimizer = torch.optim.AdamW(again.parameters())
    report = ckptmap.CheckpointManager(tmp_path / "kept_and_passed_over").restore(again, optimizer)
    assert report is not None and report.step == 4 and report.extra_per_rank == {}
    assert report.skipped[0].startswith("step-6") and report.state is not None
    assert any(text.startswith("world size: was 2, is 1") for text in report.inexact)
