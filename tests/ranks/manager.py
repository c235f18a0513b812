"""A CheckpointManager on two ranks.

python -m tests.ranks.manager FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckptmap
from tests.support.files import flip_byte_of
from tests.support.resume_model import built, train


def kept_and_passed_over(root: Path) -> None:
    model = built("fsdp2", "eager", 0)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckptmap.CheckpointManager(root, every=2, keep=2) as manager:
        for step in range(1, 7):
            train(model, optimizer, step - 1, step)
            manager.save(step, model, optimizer, extra_per_rank={"rank": dist.get_rank()})
    dist.barrier()
    assert manager.steps() == [4, 6], manager.steps()
    assert (root / "latest").read_text() == "step-6\n"
    dist.barrier()
    if dist.get_rank() == 0:
        flip_byte_of(root / "step-6", "layers.1.up.weight")
    dist.barrier()
    again = built("fsdp2", "eager", 1)
    report = manager.restore(again, torch.optim.AdamW(again.parameters()))
    assert report is not None and report.step == 4 and len(report.skipped) == 1, report
    assert report.extra_per_rank == {"rank": dist.get_rank()}


def preempted(root: Path) -> None:
    """Rank 1 alone is sent the signal; both save the same step and end with its code."""
    model = built("fsdp2", "eager", 0)
    manager = ckptmap.CheckpointManager(root, every=100)
    manager.on_preemption("SIGUSR1", exit_code=85)
    for step in range(1, 9):
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        try:
            manager.save(step, model)
        except SystemExit as end:
            assert end.code == 85 and step == 5, (end.code, step)
            break
    else:
        raise AssertionError("not preempted")
    dist.barrier()
    assert manager.steps() == [5]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in (kept_and_passed_over, preempted):
        scenario(Path(sys.argv[1]) / scenario.__name__)
        dist.barrier()
    dist.destroy_process_group()
