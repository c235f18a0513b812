"""accelerate's own loop with a CheckpointManager, and a manager over what `save_state` wrote.

python examples/integrations/manager_accelerate.py runs/manager
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

import ckptmap


def prepared(seed: int, folder: Path) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(seed)
    naming = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return (accelerator, *accelerator.prepare(model, optimizer, schedule))


def train(run: tuple[Any, Any, Any, Any], first: int, last: int, manager: Any = None) -> None:
    accelerator, model, optimizer, schedule = run
    for step in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if manager is not None:
            manager.save(step, model, optimizer, schedule)


def same(one: Any, two: Any) -> bool:
    pairs = zip(one[1].parameters(), two[1].parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def main(folder: Path) -> None:
    whole = prepared(0, folder / "whole")
    train(whole, 1, 9)
    with ckptmap.CheckpointManager(folder / "runs", every=2, keep=2) as manager:
        train(prepared(0, folder / "whole"), 1, 6, manager)
        run = prepared(1, folder / "whole")
        report = manager.restore(*run[1:])
        assert report is not None and report.step == 4
        train(run, 5, 9, manager)
    assert same(whole, run)

    theirs = prepared(
        0, folder / "theirs"
    )  # accelerate counts its saves: checkpoint_0, checkpoint_1
    for step in (1, 5):
        train(theirs, step, step + 4)
        theirs[0].save_state()
    manager = ckptmap.CheckpointManager(folder / "theirs" / "checkpoints")
    assert manager.steps() == [0, 1]
    again = prepared(1, folder / "whole")
    report = manager.restore(*again[1:3])
    assert report is not None and report.step == 1 and same(theirs, again)
    print("resumed at step 4, the same weights after step 8; save_state's checkpoint_1 is restored")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
