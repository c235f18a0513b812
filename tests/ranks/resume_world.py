"""The same run on another number of ranks: equal up to the order in which float32 sums are taken.

python -m tests.ranks.resume_world write|read FOLDER

Every step sees the same 8 sequences, whatever the number of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptmap
from tests.support.resume_model import batch, built

TOLERANCE = 2e-5
"""Of weights around 0.1 after five steps of AdamW with lr 1e-3, which divides by small roots."""


def run(seed: int) -> tuple[Any, Any]:
    model = built("fsdp2", "eager", seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def steps(model: Any, optimizer: Any, first: int, last: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        words = batch(step, size=8).chunk(world)[rank]
        logits = model(words[:, :-1])
        loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write(folder: Path) -> None:
    model, optimizer = run(0)
    steps(model, optimizer, 0, 5)
    handle = ckptmap.save(folder / "five", model, optimizer, step=5)
    steps(model, optimizer, 5, 10)
    handle.wait()
    ckptmap.save(folder / "ten", model, optimizer, step=10).wait()


def read(folder: Path) -> None:
    model, optimizer = run(1)
    report = ckptmap.load(folder / "five", model, optimizer)
    assert any("world size: was 2" in why for why in report.inexact), report.inexact
    assert not report.state or not (report.state.cast or report.state.recoded)
    steps(model, optimizer, 5, 10)
    with ckptmap.open(folder / "ten") as ckpt, ckptmap.open(folder / "five") as before:
        for fqn, param in model.named_parameters():
            want, start = ckpt[fqn].read(), before[fqn].read()
            found = param.full_tensor()
            assert torch.allclose(found, want, rtol=0, atol=TOLERANCE), fqn
            assert not torch.allclose(start, want, rtol=0, atol=10 * TOLERANCE), fqn


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
