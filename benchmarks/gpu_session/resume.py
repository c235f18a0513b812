"""A run that was saved and continued makes the same bits as one that was not stopped.

Dropout draws from the device's own generator, so its state must come back, too.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_session.models import adamw, copied, different, stack, state_of, train
from benchmarks.gpu_session.session import StepRun

LAYERS, DROPOUT = 3, 0.3
HALF, END = 5, 10


def run(step: StepRun) -> None:
    """Train through, then with a save and a load halfway, and compare losses and tensors."""
    import torch

    import ckptmap

    width = 64 if step.is_tiny else 1024
    model, optimizer = fresh(width, step.device, 0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    losses = train(model, optimizer, 0, HALF, step.device)
    scheduler.step()
    path = step.work / "half"
    ckptmap.save(path, model, optimizer, scheduler, step=HALF).wait()
    losses = train(model, optimizer, HALF, END, step.device)
    wanted, drawn = copied(state_of(model, optimizer)), torch.rand(8, device=step.device)

    for turn in range(2):
        model, optimizer = fresh(width, step.device, 100 + turn)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        torch.rand(1000 * turn + 3, device=step.device)
        report = ckptmap.load(path, model, optimizer, scheduler, exact=True)
        found = train(model, optimizer, HALF, END, step.device)
        what = f"continuation {turn + 1}"
        step.result.check(f"{what}: the losses", found == losses, f"expected {losses}, got {found}")
        wrong = different(wanted, state_of(model, optimizer))
        step.result.check(f"{what}: {len(wanted)} tensors", not wrong, str(sorted(wrong)[:6]) if wrong else "")  # fmt: skip
        again = torch.rand(8, device=step.device)
        step.result.check(f"{what}: the device's random numbers", torch.equal(drawn, again))
        if turn == 0:
            step.result.note(f"report: {report}"[:600])


def fresh(width: int, device: str, seed: int) -> tuple[Any, Any]:
    model = stack(LAYERS, width, device, seed, DROPOUT)
    return model, adamw(model)
