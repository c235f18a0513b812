"""transformers' Trainer goes on, on other numbers of ranks, with as many rows a step and no dropout: the rows are those
of the run that was not stopped, and the weights differ by rounding. With dropout, and other rows, the report says so.

python -m tests.ranks.trainer_worlds save|resume FOLDER
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.integrations.manager import trainer_callback
from ckptmap.integrations.transformers import resume
from tests.ranks.trainer_manager import StopAt, trainer, weights

ROWS = 12
NEAR = 1e-6
"""Weights of about 0.02 in float32, of sums in another order, after two steps of 0.01 at most."""


def made(folder: Path, seed: int, rate: float, rows: int, *callbacks: Any) -> Any:
    one = trainer(
        folder, seed, *callbacks, max_steps=4, eval_strategy="no", gradient_accumulation_steps=1,
        per_device_train_batch_size=rows, dataloader_drop_last=True,
    )  # fmt: skip
    for module in one.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = rate
    return one


def save(folder: Path, world: int) -> None:
    rows = ROWS // 2 // world
    whole = made(folder, 0, 0.0, rows)
    whole.train()
    if dist.get_rank() == 0:
        torch.save(weights(whole), folder / "truth.pt")
    with ckptmap.CheckpointManager(folder / "runs") as manager:
        made(folder, 0, 0.0, rows, trainer_callback(manager), StopAt(2)).train()


def go_on(folder: Path, world: int) -> None:
    saved, rows = folder / "runs" / "step-2", ROWS // 2 // world
    again = made(folder, 1, 0.0, rows)
    report = resume(again, saved).report
    assert "world size: was 3, is " in report.inexact[0], report.inexact
    assert not any("dropout" in text or "rows" in text for text in report.inexact), report.inexact
    truth, found = torch.load(folder / "truth.pt"), weights(again)
    assert all((truth[name] - found[name]).abs().max() < NEAR for name in truth)
    report = resume(made(folder, 1, 0.1, rows * 2), saved).report
    text = "; ".join(report.inexact)
    assert "dropout draws other numbers than the saved run would (1 module: " in text, text
    assert "rows of a step: was 6, is 12" in text, text
    with pytest.raises(LoadError, match="rows of a step: was 6, is 12"):
        resume(made(folder, 1, 0.0, rows * 2), saved, load_options={"exact": True})


def main(what: str, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if what == "save":
        save(folder, 3)
    else:
        go_on(folder, int(os.environ["WORLD_SIZE"]))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
